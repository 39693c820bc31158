"""Nominal peaks by device name: what no figure may exceed. Dense rates, decimal units, as the makers publish them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Peaks:
    """bytes_per_second: of memory, None if unknown. flops: by dtype label. source: where the figures come from."""

    bytes_per_second: float | None = None
    flops: Mapping[str, float] = field(default_factory=dict)
    source: str = "unknown"

    def json(self) -> dict[str, Any]:
        return {"bytes_per_second": self.bytes_per_second, "flops": dict(self.flops), "source": self.source}


def _tensor_cores(fp32: float, half: float, eight: float | None) -> Mapping[str, float]:
    flops = {"fp32": fp32, "fp16": half, "bf16": half}
    if eight is not None:
        flops |= {"fp8_e4m3": eight, "fp8_e5m2": eight, "int8": eight}
    return MappingProxyType({label: value * 1e12 for label, value in flops.items()})


_HOPPER: Final = _tensor_cores(67, 989, 1979)

# Longer names first: the first that is part of the device's name counts. TF32 is off, so fp32 has the CUDA cores' rate.
TABLE: Final = (
    ("H200", Peaks(4.8e12, _HOPPER, "nominal H200")),
    ("GH200", Peaks(4.9e12, _HOPPER, "nominal GH200")),
    ("H100 NVL", Peaks(3.9e12, _tensor_cores(60, 835, 1671), "nominal H100 NVL")),
    ("H100 PCIe", Peaks(2.0e12, _tensor_cores(51, 756, 1513), "nominal H100 PCIe")),
    ("H100", Peaks(3.35e12, _HOPPER, "nominal H100 SXM")),
    ("H20", Peaks(4.0e12, _tensor_cores(44, 148, 296), "nominal H20")),
    ("A100-SXM4-80GB", Peaks(2.039e12, _tensor_cores(19.5, 312, 624), "nominal A100 80 GB")),
    ("A100", Peaks(2.039e12, _tensor_cores(19.5, 312, 624), "nominal A100 80 GB")),
    ("L40S", Peaks(0.864e12, _tensor_cores(91.6, 362, 733), "nominal L40S")),
    ("L4", Peaks(0.3e12, _tensor_cores(30.3, 121, 242), "nominal L4")),
    ("RTX 4090", Peaks(1.008e12, _tensor_cores(82.6, 165.2, 660.6), "nominal RTX 4090")),
)


def peaks_of(name: str) -> Peaks:
    """The peaks of the device called `name`; unknown ones where the table does not have it."""
    words = name.lower()
    found = [(len(key), peaks) for key, peaks in TABLE if key.lower() in words]
    return max(found, key=lambda pair: pair[0])[1] if found else Peaks()


def cpu_peaks(cores: int) -> Peaks:
    """What no CPU of `cores` cores can exceed: two 512-bit units of four 8-bit products a lane, at 6 GHz. Its memory is
    unknown, and measured."""
    vector = cores * 6e9 * 2 * 16 * 2
    flops = {"fp32": vector, "fp16": 2 * vector, "bf16": 16 * vector, "int8": 16 * vector, "fp8_e4m3": 16 * vector}
    return Peaks(None, MappingProxyType(flops), f"no CPU of {cores} cores is faster")
