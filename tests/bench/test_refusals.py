"""Functions that cheat or say nothing, and the refusal that each must meet. None may leave with a figure.

Each catches: a harness that prints a number for it. Time, device, streams and graphs are scripted (`fake_device`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from rapid_llm.bench import BenchError, against, bench, compare
from rapid_llm.bench import errors as e
from rapid_llm.bench.device import Clocks
from rapid_llm.bench.inputs import refuse_hidden
from rapid_llm.bench.trial import RowArm
from rapid_llm.bench.work import Work
from rapid_llm.kernels import dispatch
from rapid_llm.kernels.ops.elementwise.scale import scale as native_scale
from tests.bench.cheats import CHEATS, FACTOR, MOVED, SIZE, TOOK, honest
from tests.bench.fake_device import FakeDevice


def right(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


CHECK = against(right, relative=1e-6, absolute=0.0)


def numbers(size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def run(fn: Callable[..., Any], device: FakeDevice, **changes: Any) -> Any:
    """bench() with all that an honest function would need."""
    x = changes.pop("x", None)
    args = changes.pop("args", (numbers() if x is None else x,))
    out = changes.pop("out", torch.empty(SIZE))
    options = {"work": Work(MOVED, SIZE), "check": CHECK, "samples": 7, "name": "cheat", **changes}
    return bench(fn, args, out=out, device=device, **options)


def test_an_honest_function_is_measured() -> None:
    """Catches: a harness that refuses everything, which would pass every other test here."""
    device = FakeDevice()
    result = run(honest(device), device)
    assert result.seconds.median == pytest.approx(TOOK)
    assert result.cold
    assert result.launches_a_call == 1
    assert result.bytes_per_second == pytest.approx(MOVED / TOOK)
    assert result.flags == ()


@pytest.mark.parametrize("name", list(CHEATS))
def test_cheats_are_refused(name: str) -> None:
    """Catches: a figure for the function of this name."""
    make, error = CHEATS[name]
    device = FakeDevice()
    with pytest.raises(error) as caught:
        run(make(device), device)
    if error is not BenchError:
        assert type(caught.value) is error
    assert "cheat" in str(caught.value)


# -- cheats of functions that return their result ---------------------------------------------------------------------


def test_results_in_one_memory_are_refused() -> None:
    """Catches B34: one buffer answered for every call."""
    device, shared = FakeDevice(), []

    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.frombuffer(shared[0], dtype=torch.float32)
        device.launch(TOOK, lambda: torch.mul(x, FACTOR, out=out))
        return out

    shared.append(bytearray(4 * SIZE))
    with pytest.raises(e.BenchError):
        run(fn, device, out=None)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda x, got: x, e.WrongResultError),
        (lambda x, got: got[:-1], e.WrongResultError),
        (lambda x, got: (got, got), e.WrongResultError),
        (lambda x, got: None, e.WrongResultError),
    ],
    ids=["its argument", "another shape", "two tensors", "nothing"],
)
def test_strange_answers_are_refused(answer: Callable[..., Any], error: type[BenchError]) -> None:
    """Catches: an answer that is no result of its own."""
    device = FakeDevice()

    def fn(x: torch.Tensor) -> Any:
        got = torch.empty_like(x)
        device.launch(TOOK, lambda: torch.mul(x, FACTOR, out=got))
        return answer(x, got)

    with pytest.raises(error):
        run(fn, device, out=None)


# -- declarations and inputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"work": None}, e.NoWorkError),
        ({"check": None}, e.NoCheckError),
        ({"x": torch.zeros(SIZE)}, e.DegenerateInputError),
        ({"x": torch.ones(SIZE)}, e.DegenerateInputError),
        ({"x": torch.arange(SIZE) % 3 - 1.0}, e.DegenerateInputError),
        ({"x": torch.full((SIZE,), float("nan"))}, e.DegenerateInputError),
        ({"x": numbers(1)}, e.DegenerateInputError),
        ({"args": (3,)}, e.NoCheckError),
        ({"check": against(lambda x: x * 0 + 1, relative=1e-6, absolute=0)}, e.DegenerateInputError),
        ({"check": against(lambda x: x * float("nan"), relative=1e-6, absolute=0)}, e.DegenerateInputError),
        ({"check": against(lambda x: x[:0], relative=1e-6, absolute=0)}, e.NoCheckError),
        ({"check": against(lambda x: x * 0.31, relative=1e-6, absolute=0)}, e.WrongResultError),
        ({"check": against(right, relative=10.0, absolute=10.0)}, e.DegenerateInputError),
        ({"work": Work(1000, 10**10)}, e.TooFastError),
        ({"row": "native/scale"}, e.WrongRowError),
        ({"name": "native/scale"}, e.WrongRowError),
    ],
    ids=[
        *("no work", "no check", "zeros", "ones", "three values", "nan", "one number", "no tensor"),
        *("constant result", "nan expected", "empty result", "another op", "a bound that passes anything"),
        *("beyond the FLOP peak", "not the row", "not the row it is named after"),
    ],
)
def test_what_says_nothing_is_refused(changes: dict[str, Any], error: type[BenchError]) -> None:
    """Catches: a figure for a call whose work, check, inputs or name are worth nothing."""
    device = FakeDevice()
    with pytest.raises(error):
        run(honest(device), device, **changes)


def test_zero_work_cannot_be_declared() -> None:
    """Catches: Work(0) as a way around the declaration."""
    with pytest.raises(e.NoWorkError):
        Work(0)
    with pytest.raises(ValueError, match="whole number"):
        Work(-1)
    with pytest.raises(ValueError, match="more than"):
        Work(10, read_bytes=11)


def test_dispatch_decides_which_row_may_be_named() -> None:
    """Catches: a row timed under a name that dispatch would not run, or a handle forced without saying so."""
    device, x = FakeDevice(), numbers()
    check = against(lambda x, f: x * f, relative=1e-6, absolute=0)
    options = {"args": (x, FACTOR), "check": check}
    forced = dispatch("scale", x, FACTOR, backend="native/scale")
    with pytest.raises(e.WrongRowError, match="forces this row"):
        run(forced, device, name="native/scale", **options)
    with pytest.raises(e.WrongRowError, match="runs native/scale"):
        run(forced, device, row="jit/scale", name="x", **options)
    with pytest.raises(e.WrongRowError, match="is not"):
        run(native_scale, device, row="jit/scale", name="x", **options)


# -- the device and the run -------------------------------------------------------------------------------------------


def test_a_device_that_is_always_slowed_down_ends_in_a_refusal() -> None:
    """Catches B21: every sample dropped, and an empty result or an endless loop."""
    device = FakeDevice(states=repeat(Clocks(1200, 2600, 0x40)))
    with pytest.raises(e.ThrottledError, match="7 of 7"):
        run(honest(device), device)


def test_few_slowed_samples_are_dropped() -> None:
    """Catches: disturbed samples kept, or counted as good."""
    hot, cool = Clocks(1200, 2600, 0x20), Clocks(1980, 2600, 0)
    device = FakeDevice(states=cycle([cool] * 8 + [hot] * 2))
    result = run(honest(device), device, samples=20)
    assert result.dropped == 4
    assert len(result.samples) == 16
    assert {stamp["sm_mhz"] for stamp in result.clocks} == {1200, 1980}


def test_a_power_cap_is_stamped_not_dropped() -> None:
    """Catches: large matrix products that could never be measured, for they always run under the power cap."""
    device = FakeDevice(states=repeat(Clocks(1700, 2600, 0x4)))
    result = run(honest(device), device)
    assert result.dropped == 0
    assert "power-capped" in result.flags


def test_a_host_that_is_too_slow_is_refused() -> None:
    """Catches B17: a queue that ran empty, and the host's time printed as the device's."""
    device = FakeDevice(host_bound=True)
    with pytest.raises(e.HostBoundError, match="waited for the host"):
        run(honest(device), device)


def test_an_unknown_device_is_held_to_the_ceiling_measured_here() -> None:
    """Catches: no limit at all on a device that the table does not have."""
    device = FakeDevice(name="Some GPU")
    device.calibration = type(device.calibration)(2e-6, 1e-6, 1e9, "scripted")  # type: ignore[union-attr, misc]
    device.cache_bytes = 1 << 16
    with pytest.raises(e.TooFastError, match="measured here"):
        run(honest(device, 1e-9), device)


def test_cold_and_warm_do_not_mix() -> None:
    """Catches: a cold arm beside a warm one in one table."""
    device = FakeDevice(memory=1 << 20, max_copies=64, cache_bytes=1000)
    plain = RowArm("a", honest(device), torch.empty(SIZE))
    other = RowArm("b", honest(device), torch.empty(SIZE), adapt=lambda arguments: dict(arguments))
    import rapid_llm.bench.rows as rows

    plans = iter([True, False])
    original = rows.plan_for

    def uneven(trials: Any, work: Any, seconds: float, *, cold: bool) -> Any:
        return original(trials, work, seconds, cold=next(plans))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "plan_for", uneven)
        with pytest.raises(e.MixedColdError, match="some arms"):
            compare([plain, other], [numbers()], work=Work(MOVED, SIZE), check=CHECK, device=device)


def test_the_battery_is_large() -> None:
    """Catches: refusals that nobody tries any more."""
    assert len(CHEATS) >= 36


def test_a_workspace_of_a_row_is_no_hidden_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: library rows that keep scratch memory in their module, and can then never be measured."""
    from rapid_llm.kernels.ops.elementwise import scale as module

    monkeypatch.setattr(module, "_DTYPES", {torch.float32: torch.ones(3)})
    handle = dispatch("scale", numbers(), FACTOR, backend="native/scale")
    refuse_hidden(handle, "native/scale")
    with pytest.raises(e.HiddenInputError, match="_DTYPES"):
        refuse_hidden(native_scale, "mine")


def test_calls_that_no_graph_holds_are_labelled() -> None:
    """Catches: queued calls that read as if a graph had held them."""
    device = FakeDevice()

    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        if device.capture is not None:
            raise RuntimeError("not within a capture")
        device.launch(TOOK, lambda: torch.mul(x, FACTOR, out=out))

    result = run(fn, device)
    assert not result.graph
    assert "queued" in result.flags


def test_every_refusal_is_explained() -> None:
    """Catches: two refusals of one code, and one that the documents do not name."""
    kinds, pending = set(), [BenchError]
    while pending:
        pending += (found := pending.pop()).__subclasses__()
        kinds.add(found)
    codes = [kind.code for kind in kinds if kind is not BenchError]
    assert len(set(codes)) == len(codes) > 18
    docs = Path(__file__).resolve().parents[2] / "docs"
    text = (docs / "benchmarks.md").read_text() + (docs / "benchmarking-engine.md").read_text()
    assert [code for code in codes if f"`{code}`" not in text] == []
