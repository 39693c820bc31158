"""What the harness asks of a device: run a block of calls, time it, and say in what state it was.

Real ones are `cuda_device.CudaDevice` and `cpu_device.CpuDevice`; tests inject a scripted one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final, Protocol

from .peaks import Peaks

Call = Callable[[], Any]
"""One call with its arguments bound; what it returns is its result."""

# Bits of NVML's reasons for a lowered clock.
IDLE: Final = 0x1
SETTING: Final = 0x2
POWER_CAP: Final = 0x4
SLOWED: Final = 0x8 | 0x20 | 0x40 | 0x80
"""Hardware slowdown, thermal slowdown of either kind, power brake: samples taken under these are dropped. A power cap
is the usual state of a GPU under matrix products, so it is only stamped."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """sm_mhz, memory_mhz: at this moment. reasons: NVML's bits for a lowered clock. All None where unknown."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    reasons: int | None = None

    @property
    def disturbed(self) -> bool:
        return self.reasons is not None and bool(self.reasons & SLOWED)

    @property
    def capped(self) -> bool:
        return self.reasons is not None and bool(self.reasons & POWER_CAP)

    def json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Timing:
    """seconds: of the block, by the device's own clock. host_bound: the device waited for the host meanwhile."""

    seconds: float
    host_bound: bool = False


class Block(Protocol):
    """Calls made ready to run in order. results: what each call returned, in the memory that the last run wrote.
    launches: kernels that one run launches, None where that cannot be counted. graph: one CUDA graph holds them all."""

    results: list[Any]
    launches: int | None
    graph: bool

    def enqueue(self) -> None:
        """Start all calls; on a CPU, run them."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What this device did in this run. cold, warm: seconds of one small copy whose memory was out of the cache, or in.
    bytes_per_second: the most that any pass over a large buffer reached, by the operation `by`."""

    cold: float
    warm: float
    bytes_per_second: float
    by: str

    @property
    def ratio(self) -> float:
        """How much slower cold is; 1 where the flush evicts nothing."""
        return self.cold / self.warm

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


class Device(Protocol):
    """kind: `cuda` or `cpu`. cache_bytes: of the last cache. block_seconds: how long a block should last at least.
    max_copies: the most copies of arguments that are of use. calibration, floors: filled by
    `calibration.calibrate` and `calibration.floor`."""

    calibration: Calibration | None
    floors: dict[tuple[int, bool], float]
    kind: str
    name: str
    cache_bytes: int
    peaks: Peaks
    block_seconds: float
    max_copies: int

    def budget_bytes(self) -> int:
        """Memory that copies may take."""

    def block(self, calls: Sequence[Call], *, graph: bool) -> Block:
        """Make `calls` ready; with `graph`, capture them into one CUDA graph, if the device has such."""

    def time(self, block: Block, before: Call | None, again: Call | None = None) -> Timing:
        """Run `before` outside of the timed window, then `block` inside. A device that has to try once more first
        calls `again`, for blocks that change what they work on."""

    def lag(self, block: Block) -> tuple[float, float]:
        """(seconds of the block run several times, seconds for which work went on after the event behind it)."""

    def settle(self) -> None:
        """Wait for everything that was started."""

    def reader(self, size: int) -> Call:
        """A call that reads `size` bytes of memory of its own, so that they push others out of the cache."""

    def noop(self) -> Call:
        """A call that costs what any call costs, and does nothing."""

    def fallow(self, size: int) -> Any:
        """A tensor of `size` bytes with arbitrary, varied numbers, for calibration."""

    def clocks(self) -> Clocks:
        """The device's state now."""

    def describe(self) -> dict[str, Any]:
        """For result files: name, cache, peaks, driver."""


def device_for(device: Any) -> Device:
    """`device` itself if it is one of these, else that of a torch device or its name (`cuda`, `cuda:1`, `cpu`)."""
    if hasattr(device, "block_seconds"):
        known: Device = device
        return known
    kind, _, text = str(device).partition(":")
    index = int(text) if text else None
    if kind == "cuda" and index is None:
        import torch

        index = torch.cuda.current_device()
    return _real(kind, index)


@cache
def _real(kind: str, index: int | None) -> Device:
    if kind == "cuda":
        from .cuda_device import CudaDevice

        return CudaDevice(index)
    if kind == "cpu":
        from .cpu_device import CpuDevice

        return CpuDevice()
    raise ValueError(f"device {kind!r} is unknown; use cuda, cuda:N or cpu")
