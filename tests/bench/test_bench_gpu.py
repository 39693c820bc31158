"""The timing harness on a real GPU: what a script cannot show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rapid_llm.bench import against, bench, compare, device_for
from rapid_llm.bench import errors as e
from rapid_llm.bench.calibration import COLD_RATIO, calibrate, floor
from rapid_llm.bench.cuda_device import CudaDevice
from rapid_llm.bench.work import Work

pytestmark = pytest.mark.gpu

CHECK = against(lambda x: x * 2.0, relative=1e-6, absolute=0)


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return device_for("cuda")  # type: ignore[misc]


def numbers(size: int) -> torch.Tensor:
    return torch.randn(size, device="cuda")


def work(size: int) -> Work:
    return Work(8 * size, size, 4 * size)


def double(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, 2.0, out=out)


def run(fn: Callable[..., Any], size: int, **changes: Any) -> Any:
    options = {"work": work(size), "check": CHECK, "out": torch.empty(size, device="cuda"), "name": "f", **changes}
    return bench(fn, (numbers(size),), **options)


def test_cold_is_colder(device: CudaDevice) -> None:
    """Catches B3, B9: a flush that evicts nothing."""
    found = calibrate(device)
    assert found.ratio >= COLD_RATIO, found
    limit = device.peaks.bytes_per_second
    assert limit is None or 0.5 * limit < found.bytes_per_second < limit, found


def test_a_large_copy_reaches_the_ceiling() -> None:
    """Catches: bytes, seconds or units that are off by a factor."""
    result = run(double, 1 << 26)
    assert result.cold
    assert result.graph
    assert result.launches_a_call == 1
    assert result.share is not None
    assert 0.75 < result.share < 1.05, result


def test_graph_and_queue_agree(device: CudaDevice) -> None:
    """Catches B2, B17: launch cost in one of the two, or a queue that ran empty."""
    size = 1 << 22
    graph, queue = run(double, size, graph=True), run(double, size, graph=False)
    floors = {kind: floor(device, 32, kind) for kind in (True, False)}
    difference = (queue.seconds.median - floors[False]) - (graph.seconds.median - floors[True])
    assert abs(difference) < max(0.05 * graph.seconds.median, 1e-6), (graph, queue, floors)


def test_a_known_time_is_measured(device: CudaDevice) -> None:
    """Catches B14: events on another stream than the work."""
    cycles = 2_000_000

    def spin(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.cuda._sleep(cycles)
        torch.mul(x, 2.0, out=out)

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(cycles)
    start.record()
    torch.cuda._sleep(10 * cycles)
    end.record()
    end.synchronize()
    expected = start.elapsed_time(end) / 1e4
    result = run(spin, 1 << 16, samples=7)
    assert result.seconds.median == pytest.approx(expected, rel=0.03, abs=10e-6)


def test_another_stream_is_noticed() -> None:
    """Catches B15: work that the events do not see."""
    side = torch.cuda.Stream()

    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(400_000)
            torch.mul(x, 2.0, out=out)

    with pytest.raises(e.BenchError) as caught:
        run(fn, 1 << 16)
    assert caught.value.code in ("leaked_work", "unwritten", "wrong_result", "no_launch")


def test_work_outside_of_the_graph_is_noticed() -> None:
    """Catches B13: a launch that a capture does not record, and a stale result that passes."""
    kept: dict[int, bool] = {}

    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            x.add_(0.0)  # something to capture
            return
        kept[x.data_ptr()] = True
        torch.mul(x, 2.0, out=out)

    with pytest.raises(e.UnwrittenError):
        run(fn, 1 << 16)


def test_an_empty_capture_is_noticed() -> None:
    """Catches: a graph without a kernel, timed at nothing."""

    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        if not torch.cuda.is_current_stream_capturing():
            torch.mul(x, 2.0, out=out)

    with pytest.raises(e.NoLaunchError):
        run(fn, 1 << 16)


def test_what_cannot_be_captured_is_queued() -> None:
    """Catches: a synchronising call that breaks the harness, or whose host time is printed as the device's."""

    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(x, 2.0 + 0.0 * float(x[0].item()), out=out)

    with pytest.raises(e.HostBoundError):
        run(fn, 1 << 16)


def test_a_failed_launch_is_no_result() -> None:
    """Catches P75: a launch that failed, timed as fast."""
    with pytest.raises((RuntimeError, e.BenchError)):
        run(lambda x, out: torch.mul(x, numbers(3), out=out), 1 << 16)


def test_equal_arms_are_never_called_different() -> None:
    """Catches B29: FAST or SLOW for the same function, in 40 tries."""
    size = 1 << 22
    out = torch.empty(size, device="cuda")
    x = numbers(size)
    words = []
    for _ in range(40):
        found = compare(
            {"a": double, "b": lambda x, out: double(x, out)}, (x,), work=work(size), check=CHECK, out=out, rounds=14
        )
        words.append(found.verdict("b"))
    assert not {"FAST", "SLOW"} & set(words), words
    assert words.count("SAME") > 20, words


def test_figures_repeat() -> None:
    """Catches: figures above 20 us that differ by more than 2 % within one run."""
    size = 1 << 24
    medians = [run(double, size).seconds.median for _ in range(3)]
    assert min(medians) > 20e-6
    assert max(medians) / min(medians) < 1.02, medians


def test_twice_the_work_is_slow() -> None:
    """Catches: a verdict that is blind on the real device."""
    size = 1 << 24
    out = torch.empty(size, device="cuda")

    def twice(x: torch.Tensor, out: torch.Tensor) -> None:
        double(x, out)
        double(x, out)

    found = compare({"once": double, "twice": twice}, (numbers(size),), work=work(size), check=CHECK, out=out)
    assert found.verdict("twice") == "SLOW"
    assert found.ratios["twice"].median == pytest.approx(2.0, rel=0.15)


def test_clocks_are_stamped() -> None:
    """Catches: a reader that finds no device, where the driver's library is there."""
    result = run(double, 1 << 20)
    if result.clocks:
        assert all(300 < stamp["sm_mhz"] < 4000 for stamp in result.clocks)
