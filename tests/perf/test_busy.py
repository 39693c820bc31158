"""Whether somebody else uses the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rapid_llm.bench.errors import MachineBusyError
from rapid_llm.perf.busy import LOOKS, require_idle_device


def device(*readings: int | None) -> Any:
    left: Iterator[int | None] = iter(readings)
    return SimpleNamespace(name="H200", utilisation=lambda: next(left))


def test_a_busy_gpu_is_refused_and_one_that_becomes_idle_is_waited_for() -> None:
    """Catches: the last reading taken for all, no patience, a device measured beside another program's kernels."""
    slept: list[float] = []
    assert require_idle_device(device(0, 3, 0, 0), sleep=slept.append) == 3
    assert len(slept) == LOOKS
    assert require_idle_device(device(*[90] * LOOKS, *[0] * LOOKS), sleep=slept.append) == 0
    with pytest.raises(MachineBusyError, match=r"H200 busy for 40 %.*--force-busy"):
        require_idle_device(device(*[0, 40, 0, 0] * 9), patience=2.0, sleep=slept.append)


def test_force_and_silence() -> None:
    """Catches: a refusal in spite of --force-busy, or where the device tells nothing."""
    assert require_idle_device(device(*[99] * LOOKS), force=True, sleep=lambda s: None) == 99
    assert require_idle_device(device(*[None] * LOOKS), sleep=lambda s: None) is None
    assert require_idle_device(SimpleNamespace(name="cpu")) is None
