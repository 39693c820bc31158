"""Floating-point formats as numbers: spacing, correct rounding from float64, and errors in units in the last place.

Everything works on float64 tensors and is exact: powers of two are assembled from bits, never by `pow`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Format:
    """A binary format: `precision` significant bits, exponents `emin` to `emax` of normal numbers (IEEE 754, table
    3.5)."""

    precision: int
    emin: int
    emax: int

    @property
    def unit(self) -> float:
        """Unit roundoff: the largest relative error of one rounding to nearest."""
        return 2.0**-self.precision

    @property
    def overflow(self) -> float:
        """The power of two just above the largest finite number."""
        return 2.0 ** (self.emax + 1)

    @property
    def tiny(self) -> float:
        """The smallest positive normal number."""
        return 2.0**self.emin


E4M3: Final = torch.float8_e4m3fn
LARGEST_E4M3: Final = 448.0
"""The format has no infinities, and of its top binade one code is NaN."""

FORMATS: Final = MappingProxyType(
    {
        torch.float32: Format(24, -126, 127),
        torch.float16: Format(11, -14, 15),
        torch.bfloat16: Format(8, -126, 127),
    }
)

_EVERY: Final = MappingProxyType({**FORMATS, E4M3: Format(4, -6, 8)})

LABELS: Final = MappingProxyType(
    {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp64": torch.float64,
        "uint8": torch.uint8,
        "int8": torch.int8,
        "int32": torch.int32,
        "int64": torch.int64,
    }
)
"""The package's dtype labels -> torch dtypes."""


_BIAS: Final = 1023
_STORED: Final = 0x7FF
"""Of float64: its exponent's bias, and the bits that hold it."""


def format_of(dtype: torch.dtype) -> Format:
    """The format of `dtype`; raises `ValueError` where it is not one of the formats known here."""
    try:
        return _EVERY[dtype]
    except KeyError:
        known = ", ".join(str(d).removeprefix("torch.") for d in _EVERY)
        raise ValueError(f"no floating-point format for {dtype}; known: {known}") from None


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent.to(torch.int64) + _BIAS) << 52).view(torch.float64)


def spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbours of `dtype` around |value| (float64): one ulp.

    Below the normal numbers, and for infinities and NaN, it is that of the subnormals; beyond the largest finite number
    that of the top binade.
    """
    fmt = format_of(dtype)
    # The exponent as it is stored, which for 0 and subnormals is 0, and so are infinities and NaN to be.
    stored = value.to(torch.float64).contiguous().view(torch.int64).bitwise_right_shift(52).bitwise_and_(_STORED)
    stored.masked_fill_(stored == _STORED, 0).clamp_(fmt.emin + _BIAS, fmt.emax + _BIAS)
    return stored.sub_(fmt.precision - 1).bitwise_left_shift_(52).view(torch.float64)


def half_ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of rounding |value| (float64) to nearest in `dtype`, short of overflow."""
    return spacing(value, dtype) / 2


def round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` (float64) correctly rounded to `dtype`: nearest, ties to even, overflow to infinity. Stays float64.

    torch's own conversion from double to half rounds twice, so it is not used.
    """
    fmt = format_of(dtype)
    step = spacing(value, dtype)
    rounded = (value / step).round_().mul_(step)  # infinities and NaN stay what they are
    overflowed = rounded.abs() >= fmt.overflow
    return torch.where(overflowed, torch.copysign(torch.full_like(value, float("inf")), value), rounded)


def truncate_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` (float64) rounded towards zero in `dtype`; the fault that a careless store makes."""
    step = spacing(value, dtype)
    return torch.where(torch.isfinite(value), torch.trunc(value / step) * step, value)


def saturated(value: Tensor) -> Tensor:
    """`value` (float64) as the nearest number of e4m3, ties to even, none beyond the largest. Stays float64."""
    return round_to(value.clamp(-LARGEST_E4M3, LARGEST_E4M3), E4M3)


def e4m3_numbers() -> Tensor:
    """Every number of e4m3, ascending, as float64; 0 once."""
    count = torch.arange(-7, 8, dtype=torch.float64) * 2.0**-9
    binades = [(1 + torch.arange(8, dtype=torch.float64) / 8) * 2.0**e for e in range(-6, 9)]
    normal = torch.cat(binades)[:-1]
    return torch.cat((-normal.flip(0), count, normal))


def ulp_error(got: Tensor, expected: Tensor, dtype: torch.dtype) -> Tensor:
    """|got - expected| in ulps of `dtype` at the expected value; 0 where both are the same infinity or both NaN."""
    got, expected = got.to(torch.float64), expected.to(torch.float64)
    same = (got == expected) | (torch.isnan(got) & torch.isnan(expected))
    error = (got - expected).abs() / spacing(expected, dtype)
    return torch.where(same, torch.zeros_like(error), torch.nan_to_num(error, nan=float("inf"), posinf=float("inf")))


def lowest_bit(value: Tensor) -> Tensor:
    """The weight of the lowest set bit of each float64, as float64; +inf for 0, and 0 for NaN and infinities.

    Numbers that are all multiples of `q` and whose magnitudes add up to at most 2**24 * q are summed by fp32 without
    any error, in whatever order: this is how a bound learns that a case is exact.
    """
    finite = torch.isfinite(value)
    mantissa, exponent = torch.frexp(torch.where(finite, value, torch.zeros_like(value)))
    integer = (mantissa.abs() * 2.0**53).to(torch.int64)  # the 53-bit significand; the product is exact
    lowest = (integer & -integer).to(torch.float64)
    # exponent - 53 leaves the normal float64 range only for inputs below 1e-291, far under fp32's smallest.
    weight = lowest * _power_of_two((exponent.to(torch.int64) - 53).clamp(-1022, 1023))
    weight = torch.where(integer == 0, torch.full_like(weight, float("inf")), weight)
    return torch.where(finite, weight, torch.zeros_like(weight))
