"""The engine's one clock. Nothing else in `rapid_llm.engine` reads time, so a figure always means the same thing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

now: Callable[[], float] = time.perf_counter
"""Seconds from an arbitrary origin; monotonic, for differences only."""


class CallTimer(Protocol):
    """Times single calls. `measure` returns the call's result and a reading, `seconds` resolves a reading."""

    def measure(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]: ...

    def seconds(self, reading: Any) -> float: ...


class HostTimer:
    """Wall time of a call; right where the call returns only once its work is done, as on a CPU."""

    def measure(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, float]:
        start = now()
        result = fn(*args, **kwargs)
        return result, now() - start

    def seconds(self, reading: float) -> float:
        return reading


class CudaTimer:
    """Time between two events around a call on the current stream; readings are resolved after the step."""

    def measure(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        import torch  # only a CUDA engine gets here; the module itself stays torch-free

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = fn(*args, **kwargs)
        end.record()
        return result, (start, end)

    def seconds(self, reading: Any) -> float:
        start, end = reading
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def call_timer(device_type: str) -> CallTimer:
    """The timer for a device type (`cpu` or `cuda`)."""
    return CudaTimer() if device_type == "cuda" else HostTimer()
