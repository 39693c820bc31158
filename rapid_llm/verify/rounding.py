"""The pieces that error bounds are made of, each with its source.

Throughout, `U` is fp32's unit roundoff 2**-24 and `gamma(n) = n U / (1 - n U)` (Higham, Accuracy and Stability of
Numerical Algorithms, 2nd ed., section 3.1): a sum of n fp32 terms, in whatever order, errs by at most gamma(n - 1)
times the sum of their magnitudes, and by gamma(n) if each term carries one more rounding, such as a product.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.verify.ulp import FORMATS, LABELS, half_ulp, round_to

U: Final = 2.0**-24
"""Unit roundoff of fp32."""

BLOCK_INTEGERS: Final = "int16"
"""Label of a rounding to 16-bit integers times one scale a block of 32 values."""

FP8_GROUPS: Final = "fp8_block128"
"""Label of a rounding to fp8 e4m3 times one scale for 128 values along the last dimension: largest magnitude / 448."""

FLUSH: Final = "subnormal:zero"
"""Declared by a row that may take fp32 numbers below 2**-126 for 0, operands and results alike, as code compiled with
-ftz=true does (nvcc -use_fast_math). bf16 has such numbers; fp16 has none."""

TINY: Final = 2.0**-126
"""fp32's smallest normal number: what a flush of subnormals to zero may lose (ex2.approx.ftz, PTX ISA)."""

SUBNORMAL: Final = 2.0**-149
"""fp32's smallest positive number: a product below the normal numbers errs by at most half of it."""

DIVISION: Final = 4.0 * U
"""Relative error of an fp32 division: div.full.f32 has at most 2 ulp (PTX ISA), an IEEE division half an ulp."""

RSQRT: Final = 8.0 * U
"""Relative error of an fp32 reciprocal square root by any usual route. rsqrtf errs by at most 2 ulp = 4 U (CUDA C++
Programming Guide, table of standard functions), rsqrt.approx.f32 by 2**-22.9 = 2.2 U (PTX ISA), an approximate square
root (2**-23 = 2 U) with a full-range division (4 U) by 6 U."""


def gamma(n: Tensor | float) -> Tensor:
    """n U / (1 - n U)."""
    count = torch.as_tensor(n, dtype=torch.float64)
    return count * U / (1.0 - count * U)


def exp_error(argument: Tensor) -> Tensor:
    """Relative error of exp(argument) in fp32.

    __expf errs by at most 2 + floor(1.173 |x|) ulp (CUDA C++ Programming Guide, table of intrinsic functions), which
    counts the rounding of x log2(e); an ulp is at most 2 U. Library versions (expf, SLEEF) are within 1 ulp.
    """
    return (2.0 + 1.173 * argument.abs()) * 2.0 * U


def fp32_rounding(value: Tensor) -> Tensor:
    """The error of rounding each float64 to fp32: 0 where it is an fp32 number already."""
    return distance(value, torch.float32)


def distance(value: Tensor, dtype: torch.dtype) -> Tensor:
    """|value - its nearest number of `dtype`|; 0 for infinities, NaN and overflow."""
    error = (round_to(value, dtype) - value).abs()
    return torch.where(torch.isfinite(error), error, torch.zeros_like(error))


def declared(roundings: tuple[str, ...], argument: str) -> list[torch.dtype]:
    """The dtypes to which a row rounds `argument`, from declarations such as `weight:bf16`."""
    found = []
    for rounding in roundings:
        name, _, label = rounding.partition(":")
        if label in (BLOCK_INTEGERS, FP8_GROUPS) or rounding == FLUSH:
            continue
        if label not in LABELS or LABELS[label] not in FORMATS:
            raise ValueError(
                f"rounding {rounding!r} is neither {FLUSH!r} nor of the form 'argument:dtype' with fp32, fp16, bf16, "
                "int16 or fp8_block128"
            )
        if name == argument:
            found.append(LABELS[label])
    return found


def argument_rounding(value: Tensor, roundings: tuple[str, ...], argument: str) -> Tensor:
    """The error that the declared roundings of `argument` make on each of its values (float64)."""
    error = torch.zeros_like(value)
    for dtype in declared(roundings, argument):
        error = error + distance(value, dtype)
    if f"{argument}:{BLOCK_INTEGERS}" in roundings:
        error = error + _block_integer_error(value)
    if f"{argument}:{FP8_GROUPS}" in roundings:
        error = error + _fp8_group_error(value)
    return error


def _fp8_group_error(value: Tensor) -> Tensor:
    """Half an ulp of e4m3: 2**-4 relative, or half of its smallest step, 2**-10, times the scale; with it the fp32
    roundings of the scale, the quotient and the product, which may tip a tie (2**-10 covers them and 6 U).

    A group whose largest value is below 1e-30 may be taken as 0.
    """
    count = value.shape[-1]
    whole = torch.nn.functional.pad(value.abs(), (0, -count % 128))
    groups = torch.nan_to_num(whole, nan=0.0, posinf=0.0).unflatten(-1, (whole.shape[-1] // 128, 128))
    largest = groups.amax(-1, keepdim=True)
    step = torch.maximum(groups * 2.0**-4, largest / 448 * 2.0**-10) * (1 + 2.0**-10) + 6 * U * groups
    return torch.where(largest <= 1e-30, largest, step).flatten(-2)[..., :count]


def _block_integer_error(value: Tensor) -> Tensor:
    """Half a step of max / 32767 per block of 32, and the fp32 roundings of the step, its inverse and the quotient.

    The quotient is at most 32767 and its relative error 3 U, which moves it by 0.006 of a step at most; the step's own
    rounding moves every value by U relative. Steps of blocks whose largest value is below 1e-30 may be taken as 0.
    """
    blocks = torch.nan_to_num(value.abs(), nan=0.0, posinf=0.0).unflatten(-1, (value.shape[-1] // 32, 32))
    largest = blocks.amax(-1, keepdim=True)
    error = torch.where(largest <= 1e-30, largest, 0.506 * largest / 32767) + U * blocks
    return error.flatten(-2)


def flush(roundings: tuple[str, ...]) -> float:
    """What one flush to zero may lose: nothing unless it is declared."""
    return TINY if FLUSH in roundings else 0.0


def finish(expected: Tensor, slack: Tensor, dtype: torch.dtype, roundings: tuple[str, ...] = ()) -> Tensor:
    """The bound of a result: `slack` before the store, then the declared roundings of the output (a flush of the fp32
    result among them), then the store itself.

    A value within `slack` of the expected one rounds to within half an ulp *of its own binade*, so the half ulp is
    taken at |expected| + slack. Infinite and NaN expectations get 0: they are compared exactly.
    """
    bound = torch.where(torch.isfinite(slack), slack, torch.zeros_like(slack)) + flush(roundings)
    magnitude = torch.nan_to_num(expected.abs(), nan=0.0, posinf=0.0)
    for step in (*declared(roundings, "output"), dtype):
        bound = bound + half_ulp(magnitude + bound, step)
    return torch.where(torch.isfinite(expected), bound, torch.zeros_like(bound))
