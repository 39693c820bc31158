"""The real CPU as a device, and the parts of the GPU's that can be looked at without one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from rapid_llm.bench import against, bench, device_for
from rapid_llm.bench import errors as e
from rapid_llm.bench.calibration import calibrate, floor
from rapid_llm.bench.cpu_device import CpuDevice
from rapid_llm.bench.device import Calibration, Clocks
from rapid_llm.bench.digests import source_digest
from rapid_llm.bench.nvml import read_clocks
from rapid_llm.bench.work import Work
from rapid_llm.kernels.registry import get_row
from tests.bench.fakes import FakeClock

SIZE = 4096
CHECK = against(lambda x: x * 2.0, relative=1e-6, absolute=0)


def small(clock: Any = None) -> CpuDevice:
    device = CpuDevice(budget=1 << 22) if clock is None else CpuDevice(clock, budget=1 << 22)
    device.cache_bytes, device.max_copies, device.block_seconds = 1 << 18, 4, 1e-5
    device.calibration = Calibration(2.0, 1.0, 1e13, "scripted")
    if clock is not None:
        device.noop = lambda: clock.work(10)  # type: ignore[method-assign]
    return device


def test_a_real_function_on_the_real_clock() -> None:
    """Catches: a device that only works in scripts."""
    result = bench(
        lambda x: x * 2.0, (torch.randn(SIZE),), work=Work(8 * SIZE), check=CHECK, device=small(), samples=30
    )
    assert result.seconds.median > 0
    assert result.cold
    assert not result.graph
    assert result.launches_a_call is None
    assert result.dtype == "fp32"


def test_flush_and_garbage_stay_outside_of_the_window() -> None:
    """Catches B26: what happens before a block counted as its time."""
    clock = FakeClock()
    device = small(clock)
    block = device.block([clock.work(500)], graph=True)
    assert device.time(block, clock.work(10**9)).seconds == pytest.approx(500e-9)


def test_a_thread_that_goes_on_is_noticed() -> None:
    """Catches B15 on a CPU: the call returns, and a thread does the work."""
    event = threading.Event()

    def fn(x: torch.Tensor) -> torch.Tensor:
        out = x * 2.0
        threading.Thread(target=event.wait, args=(0.2,), daemon=True).start()
        return out

    with pytest.raises(e.LeakedWorkError, match="another stream or thread"):
        bench(fn, (torch.randn(SIZE),), work=Work(8 * SIZE), check=CHECK, device=small(), name="f")
    event.set()


def test_faster_than_the_memory_here_is_refused() -> None:
    """Catches B9 on a CPU: a figure beyond what this memory gave, measured again before it is said."""
    clock = FakeClock()

    def fn(x: torch.Tensor) -> torch.Tensor:
        clock.now += 1
        return x * 2.0

    device = small(clock)
    device.calibration = Calibration(2.0, 1.0, 1e9, "scripted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rapid_llm.bench.calibration.cold_and_warm", lambda device: (2.0, 1.0))
        patch.setattr("rapid_llm.bench.calibration.ceiling", lambda device: (2e9, "sum"))
        with pytest.raises(e.TooFastError, match=r"measured here"):
            bench(fn, (torch.randn(SIZE),), work=Work(8 * SIZE), check=CHECK, device=device, name="f")
    assert device.calibration.bytes_per_second == 2e9


def test_calibration_of_this_cpu() -> None:
    """Catches: a calibration that divides by nothing or reads impossible rates."""
    device = CpuDevice(budget=1 << 22)
    device.cache_bytes = 1 << 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rapid_llm.bench.calibration.ceiling", lambda device: (1e10, "sum"))
        found = calibrate(device)
    assert found.cold > 0
    assert found.warm > 0
    assert calibrate(device) is found
    assert 0 < floor(device, 100, False) < 1e-3


def test_unknown_devices_are_named() -> None:
    """Catches: a typo that measures the CPU."""
    with pytest.raises(ValueError, match="'tpu' is unknown"):
        device_for("tpu")
    assert device_for("cpu") is device_for("cpu")
    assert device_for(torch.device("cpu")).kind == "cpu"


def test_clocks_are_unknown_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a machine without NVML that cannot measure, or whose clocks read 0."""
    monkeypatch.setattr("rapid_llm.bench.nvml._handle", lambda uuid: None)
    found = read_clocks("GPU-0")
    assert found == Clocks(None, None, None)
    assert not found.disturbed
    assert not found.capped


def test_reasons_for_lower_clocks() -> None:
    """Catches: idle clocks or a user's own setting taken for a slow-down."""
    assert not Clocks(reasons=0x1).disturbed
    assert not Clocks(reasons=0x2).disturbed
    assert all(Clocks(reasons=bit).disturbed for bit in (0x8, 0x20, 0x40, 0x80))
    assert Clocks(reasons=0x4).capped


def test_figures_name_their_source() -> None:
    """Catches: a digest that is the same for every row, or missing."""
    digests = {source_digest(get_row(name)) for name in ("native/scale", "jit/scale", "native/rmsnorm")}
    assert len(digests) == 3
    assert None not in digests


def test_the_first_call_is_neither_blocked_nor_timed() -> None:
    """Catches B23: a compile within the window, or behind a kernel that blocks the stream."""
    clock = FakeClock()
    calls = [0]

    def fn(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        clock.now += 10**9 if calls[0] == 1 else 5000
        return x * 2.0

    result = bench(fn, (torch.randn(SIZE),), work=Work(8 * SIZE), check=CHECK, device=small(clock), name="f")
    assert result.seconds.max == pytest.approx(5e-6)
