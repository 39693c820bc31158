"""What this device reaches in this very run: bytes a second over a large buffer, FLOPs a second of a large product.

Shares are of what was measured, for no run can beat its own machine; the maker's nominal figures stand beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rapid_llm.bench import calibrate
from rapid_llm.bench.calibration import TOLERANCE
from rapid_llm.bench.device import Call, Device
from rapid_llm.bench.errors import ResolutionError, TooFastError
from rapid_llm.bench.work import amount_text

from .needs import Needs

PRODUCTS: Final = {"cuda": (4096, 8192), "cpu": (1024,)}
"""Sides of the square products that are timed, by device type."""

CALLS: Final = 4
TIMES: Final = 5
CACHES: Final = 8
"""A step that moves less than so many caches may find part of it there, and is not refused for beating memory."""


@dataclass(frozen=True, slots=True)
class Limits:
    """bytes_per_second, flops_per_second: the best that was reached here; bytes_by, flops_by: by what. nominal: of the
    maker, None where unknown. cache_bytes: of the last cache. kind: `cuda` or `cpu`."""

    kind: str
    bytes_per_second: float
    bytes_by: str
    flops_per_second: float
    flops_by: str
    cache_bytes: int = 0
    nominal_bytes_per_second: float | None = None
    nominal_flops_per_second: float | None = None
    nominal_source: str = "unknown"

    def seconds(self, needs: Needs) -> tuple[float, str]:
        """The least time that `needs` take, and which side sets it: `memory` or `compute`."""
        memory, compute = needs.bytes / self.bytes_per_second, needs.flops / self.flops_per_second
        return (memory, "memory") if memory >= compute else (compute, "compute")

    def refuse_too_fast(self, what: str, needs: Needs, steps: int, seconds: float) -> None:
        """Raise `TooFastError` where `needs`, of `steps` steps, in `seconds` lie beyond what memory gives."""
        reached = needs.bytes / seconds
        slack = TOLERANCE.get(self.kind, 1.05)
        if reached > self.bytes_per_second * slack and needs.bytes / steps > CACHES * self.cache_bytes:
            raise TooFastError(
                f"{what}: {amount_text(reached, 'B/s')} is above {amount_text(self.bytes_per_second, 'B/s')}, the most "
                "that this device's memory gave in this run; the steps do less than they should, or the machine was "
                "disturbed while it was calibrated: run again"
            )

    def better(self, other: Limits) -> Limits:
        """The higher of two measurements, side by side."""
        found = self
        if other.bytes_per_second > found.bytes_per_second:
            found = replace(found, bytes_per_second=other.bytes_per_second, bytes_by=other.bytes_by)
        if other.flops_per_second > found.flops_per_second:
            found = replace(found, flops_per_second=other.flops_per_second, flops_by=other.flops_by)
        return found

    def json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "cache_bytes": self.cache_bytes,
            "bytes_per_second": {"measured": self.bytes_per_second, "by": self.bytes_by},
            "flops_per_second": {"measured": self.flops_per_second, "by": self.flops_by},
            "nominal": {
                "bytes_per_second": self.nominal_bytes_per_second,
                "flops_per_second": self.nominal_flops_per_second,
                "source": self.nominal_source,
            },
        }


def measure_limits(device: Device, torch_device: Any, dtypes: Sequence[str], *, again: bool = False) -> Limits:
    """Both ceilings. dtypes: labels of the dtypes whose products may count (`bf16`); the fastest does. again: measure
    memory anew, and keep the better."""
    memory = calibrate(device, again=again)
    flops, by = max((product_rate(device, torch_device, n, d), f"{d} {n}^3") for d in dtypes for n in _sides(device))
    nominal = [device.peaks.flops[d] for d in dtypes if d in device.peaks.flops] if device.kind == "cuda" else []
    return Limits(
        kind=device.kind,
        bytes_per_second=memory.bytes_per_second,
        bytes_by=memory.by,
        flops_per_second=flops,
        flops_by=by,
        cache_bytes=device.cache_bytes,
        nominal_bytes_per_second=device.peaks.bytes_per_second,
        nominal_flops_per_second=max(nominal, default=None),
        nominal_source=device.peaks.source,
    )


def dtypes_of_products(dtype: str, device: Any) -> list[str]:
    """Labels of what products may be computed in: the activations' dtype, and where the engine may round, bf16 too.

    dtype: as an engine's option; device: torch's.
    """
    from rapid_llm.models.decoder import DTYPES, activation_dtype

    chosen = activation_dtype(dtype, device)
    labels = [label for label, known in DTYPES.items() if known == chosen]
    return [*labels, "bf16"] if dtype == "auto" and device.type == "cpu" else labels


def _sides(device: Device) -> tuple[int, ...]:
    return PRODUCTS[device.kind]


def product_rate(device: Device, torch_device: Any, side: int, dtype: str) -> float:
    """FLOPs a second of a product of two square matrices by torch."""
    import torch

    from rapid_llm.models.decoder import DTYPES

    made: dict[str, Any] = {"dtype": DTYPES[dtype], "device": torch_device}
    a, b = torch.rand((side, side), **made), torch.rand((side, side), **made)
    out = torch.empty((side, side), **made)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    calls: list[Call] = [multiply] * CALLS
    multiply()
    block = device.block(calls, graph=True)
    seconds = min(device.time(block, None).seconds for _ in range(TIMES + 1)) / CALLS
    if not seconds > 0:
        raise ResolutionError(f"a product of {side} x {side} took no time by this clock")
    return 2.0 * side**3 / seconds
