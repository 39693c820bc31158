"""Formats, rounding, ulps and the pieces of bounds, against torch, exact fractions and plain definitions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from rapid_llm.verify.rounding import U, exp_error, finish, gamma
from rapid_llm.verify.ulp import (
    FORMATS,
    LABELS,
    format_of,
    half_ulp,
    lowest_bit,
    round_to,
    spacing,
    truncate_to,
    ulp_error,
)

DTYPES = list(FORMATS)


def every(dtype: torch.dtype) -> torch.Tensor:
    """All finite values of a 16-bit format, or every 65537th of fp32."""
    if dtype == torch.float32:
        raw = torch.arange(-(2**31), 2**31, 65537, dtype=torch.int64).to(torch.int32).view(dtype)
    else:
        raw = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return raw[torch.isfinite(raw)].to(torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spacing_is_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    """Would go red for a wrong exponent, at the subnormals or at a power of two."""
    values = every(dtype).abs()
    values = values[values < torch.finfo(dtype).max]
    following = torch.nextafter(values.to(dtype), torch.tensor(math.inf, dtype=dtype)).to(torch.float64)
    assert torch.equal(spacing(values, dtype), following - values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_keeps_numbers_and_breaks_ties_to_even(dtype: torch.dtype) -> None:
    """Would go red if rounding moved a representable number, or sent a tie to the odd neighbour."""
    values = every(dtype)
    assert torch.equal(round_to(values, dtype), values)
    inner = values[(values.abs() < torch.finfo(dtype).max / 2) & (values >= 0)]
    step = spacing(inner, dtype)
    ties = round_to(inner + step / 2, dtype)
    assert bool(((ties / step) % 2 == 0).logical_or(ties == inner + step).all())
    assert torch.equal(round_to(inner + step * 0.49, dtype), inner)
    assert torch.equal(truncate_to(inner + step * 0.99, dtype), inner)


def test_rounding_agrees_with_torch_from_fp32() -> None:
    """torch rounds fp32 to 16 bits once and correctly; from double it rounds twice, so double isn't used here."""
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-44, 38, 200_000)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(round_to(values.double(), dtype), values.to(dtype).double())


def test_double_rounding_is_avoided() -> None:
    """Would go red if `round_to` went through fp32: just above a tie of fp16, fp32 sees the tie itself."""
    value = torch.tensor([1.0 + 2.0**-11 + 2.0**-40], dtype=torch.float64)
    assert float(round_to(value, torch.float16)) == 1.0 + 2.0**-10


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_overflow(dtype: torch.dtype) -> None:
    """Would go red if the threshold of overflow were off: half an ulp beyond the largest number, ties to infinity."""
    largest = torch.finfo(dtype).max
    half = float(half_ulp(torch.tensor(largest, dtype=torch.float64), dtype))
    below = torch.tensor([largest + 0.99 * half, -(largest + 0.99 * half)], dtype=torch.float64)
    assert round_to(below, dtype).tolist() == [largest, -largest]
    assert round_to(torch.tensor([largest + half], dtype=torch.float64), dtype).tolist() == [math.inf]


def test_ulp_error() -> None:
    """Would go red if the unit were that of the wrong side, or NaN counted as close."""
    expected = torch.tensor([1.0, 1.0, math.nan, math.inf, 1.0, 2.0**-149], dtype=torch.float64)
    got = torch.tensor([1.0, 1.0 + 2.0**-23, math.nan, math.inf, math.nan, 0.0])
    assert ulp_error(got, expected, torch.float32).tolist() == [0.0, 1.0, 0.0, 0.0, math.inf, 1.0]


def test_lowest_bit() -> None:
    """Would go red if exactness were claimed of numbers that have lower bits."""
    values = [1.0, 3.0, 12.0, 0.75, 1 + 2.0**-23, 0.1, -6.0]
    got = lowest_bit(torch.tensor(values, dtype=torch.float64)).tolist()
    assert got == [float(Fraction(1, Fraction(v).denominator)) if v % 1 else float(int(v) & -int(v)) for v in values]
    assert lowest_bit(torch.tensor([0.0, math.nan, math.inf], dtype=torch.float64)).tolist() == [math.inf, 0.0, 0.0]


def test_gamma_covers_the_worst_sum() -> None:
    """Would go red if gamma were below an error that really occurs: 1 + n tiny terms, each lost to rounding."""
    n = 4096
    terms = torch.full((n,), 2.0**-25)
    total = torch.tensor(1.0)
    for t in terms:
        total = total + t
    exact = 1.0 + n * 2.0**-25
    assert exact - float(total) == n * 2.0**-25
    assert float(total) == 1.0
    assert n * 2.0**-25 <= float(gamma(n)) * exact


def test_exp_error_covers_the_fast_exponential() -> None:
    """Would go red if the allowance were less than what exp2(x log2 e) in fp32 loses on its argument."""
    x = torch.linspace(-80, 80, 20001)
    fast = torch.exp2((x * math.log2(math.e)).double()).double()
    exact = torch.exp(x.double())
    assert bool((((fast - exact) / exact).abs() <= exp_error(x.double())).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_finish_lets_the_correctly_rounded_pass_and_the_next_one_fail(dtype: torch.dtype) -> None:
    """At every exponent: the bound without slack is exactly the rounding of the store (B42)."""
    values = every(dtype)
    values = values[values.abs() < torch.finfo(dtype).max / 2]
    between = values + spacing(values, dtype) * 0.4
    bound = finish(between, torch.zeros_like(between), dtype)
    right = round_to(between, dtype)
    assert bool(((right - between).abs() <= bound).all())
    other = right - spacing(right, dtype) * torch.sign(right + (right == 0))
    beside = torch.where(values >= 0, right + spacing(right, dtype), other)
    assert bool(((beside - between).abs() > bound).all())


def test_format_of_names_what_it_knows() -> None:
    with pytest.raises(ValueError, match="int8"):
        format_of(torch.int8)
    assert LABELS["bf16"] == torch.bfloat16
    assert FORMATS[torch.float32].unit == U
