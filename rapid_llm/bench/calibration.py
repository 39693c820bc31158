"""What the device does in this very run: how much slower cold is, what its memory gives, what doing nothing costs."""

from __future__ import annotations

import statistics
from typing import Any, Final

from .device import Block, Calibration, Call, Device
from .errors import ResolutionError
from .rotation import CACHE_MULTIPLE

COLD_RATIO: Final = 1.3
"""Below it, flushing does not evict, and nothing may be called cold."""

SHARES: Final = (16, 8, 4)
TIMES: Final = 7
TOLERANCE: Final = {"cpu": 1.25, "cuda": 1.05}
"""How far above a measured ceiling a figure may lie: neighbours slow the measurement of a CPU's down."""


def calibrate(device: Device, *, again: bool = False) -> Calibration:
    """The device's calibration, made at the first demand, or `again`; the better of two ceilings is kept."""
    known = device.calibration
    if known is not None and not again:
        return known
    cold, warm = cold_and_warm(device)
    best, by = ceiling(device)
    if known is not None and known.bytes_per_second > best:
        best, by = known.bytes_per_second, known.by
    device.calibration = Calibration(cold, warm, best, by)
    return device.calibration


def cold_and_warm(device: Device) -> tuple[float, float]:
    """Seconds of one copy behind a flush and behind itself, less what an empty call costs: of several sizes up to a
    quarter of the cache, the one that shows the largest difference."""
    flush = device.reader(CACHE_MULTIPLE * device.cache_bytes)
    nothing = _best(device, device.block([device.noop()], graph=True), None) if device.kind == "cuda" else 0.0
    pairs = []
    for share in SHARES:
        source = device.fallow(device.cache_bytes // share)
        target = source.clone()
        copy = _copying(target, source)
        block = device.block([copy], graph=True)
        cold, warm = _best(device, block, flush), _best(device, block, copy)
        pairs.append((max(cold - nothing, 0.2 * cold), max(warm - nothing, 0.2 * warm)))
    return max(pairs, key=lambda pair: pair[0] / pair[1])


def _copying(target: Any, source: Any) -> Call:
    return lambda: target.copy_(source)


def ceiling(device: Device) -> tuple[float, str]:
    """Bytes a second of the fastest pass over a buffer of eight caches, and what that pass was."""
    import torch

    if device.kind == "cpu":
        from .bandwidth import read_bandwidth

        reached = read_bandwidth()
        return reached.bytes_per_second, reached.by
    size = max(8 * device.cache_bytes, 1 << 28)
    source = device.fallow(size)
    target = source.clone()
    total = torch.zeros((), device=source.device)
    size = source.numel() * source.element_size()
    passes: dict[str, tuple[int, Call]] = {
        "copy": (2 * size, lambda: target.copy_(source)),
        "sum": (size, lambda: torch.sum(source, dim=0, out=total)),
        "fill": (size, lambda: target.zero_()),
    }
    best, by = 0.0, ""
    for name, (moved, run) in passes.items():
        run()
        reached_rate = moved / _median(device, device.block([run] * 4, graph=True), None) * 4
        if reached_rate > best:
            best, by = reached_rate, name
    return best, by


def floor(device: Device, calls: int, graph: bool) -> float:
    """Seconds a call of a block of `calls` calls that do nothing; measured once for each number of them."""
    known = device.floors.get((calls, graph))
    if known is None:
        known = _median(device, device.block([device.noop()] * calls, graph=graph), None) / calls
        device.floors[calls, graph] = known
    return known


def _median(device: Device, block: Block, before: Call | None) -> float:
    device.time(block, before)
    seconds = statistics.median(device.time(block, before).seconds for _ in range(TIMES))
    if not seconds > 0:
        raise ResolutionError("calibration: the clock did not move in a block of calls")
    return seconds


def _best(device: Device, block: Block, before: Call | None) -> float:
    """The shortest of several: what disturbs only adds."""
    seconds = min(device.time(block, before).seconds for _ in range(TIMES))
    if not seconds > 0:
        raise ResolutionError("calibration: the clock did not move in a small copy")
    return seconds


def described(calibration: Calibration) -> dict[str, Any]:
    return {**calibration.json(), "cold_is_colder": calibration.ratio >= COLD_RATIO}
