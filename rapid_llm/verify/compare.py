"""Element by element: is a result within its bound of the oracle's? NaN and infinities are matched by place,
exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rapid_llm.verify.selection import AcceptableIds
from rapid_llm.verify.ulp import FORMATS, format_of, spacing, ulp_error

SHOWN = 3
"""Wrong elements that a failure lists."""

NORM_LIMIT = 0.9
"""The largest root mean square of errors, as shares of their bounds, over a row. Independent roundings give 0.58; a
bias that stays within every element's own bound gives more."""

NORM_COUNT = 64
"""Errors that a row needs before its norm means anything; half as many must differ."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """elements compared, the worst error in ulps of the output, the worst share of the bound, the worst norm of the
    shares over a row, and what is wrong, if any."""

    elements: int
    worst_ulp: float = 0.0
    worst_ratio: float = 0.0
    problem: str | None = None
    worst_norm: float = 0.0


def compare(got: Tensor, expected: Tensor, bound: Tensor, *, shared: bool = False) -> Comparison:
    """`got` in its own dtype against float64 `expected`, both on the CPU; `bound` is absolute and >= 0.

    Infinity is right where the bound reaches the power of two beyond the largest finite number, as rounding to nearest
    overflows there. shared: a row's elements may err alike, because an operand that they share was rounded; then the
    norm of a row is not judged.
    """
    if got.shape != expected.shape:
        return Comparison(0, problem=f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    if got.numel() == 0:
        return Comparison(0)
    if bound.shape != expected.shape or not float(bound.min()) >= 0:  # the least of numbers and NaN is NaN
        raise ValueError("a bound must be a non-negative number for every element")
    value = got.to(torch.float64)
    error = (value - expected).abs_()
    worst = float(error.max())
    if math.isfinite(worst):
        return _finite(value, expected, bound, error, worst, got.dtype, shared)
    finite = torch.isfinite(expected)
    same = (value == expected) | (torch.isnan(value) & torch.isnan(expected))
    good = torch.where(finite, error <= bound, same)
    if got.dtype in FORMATS:
        overflow = format_of(got.dtype).overflow
        may_overflow = finite & torch.isinf(value) & (torch.sign(value) == torch.sign(expected))
        good = good | (may_overflow & (expected.abs() + bound >= overflow))
        ulps = torch.where(torch.isfinite(value) & finite, ulp_error(got, expected, got.dtype), torch.zeros_like(error))
        worst_ulp = float(ulps.max())
    else:
        worst_ulp = float(torch.where(finite, error, torch.zeros_like(error)).max())
    ratio = torch.where(finite & torch.isfinite(value) & (error > 0), error / bound, torch.zeros_like(error))
    problem = None if bool(good.all()) else _describe(value, expected, bound, ~good)
    return _judged(ratio, worst_ulp, problem, shared)


def _finite(
    value: Tensor, expected: Tensor, bound: Tensor, error: Tensor, worst: float, dtype: torch.dtype, shared: bool
) -> Comparison:
    """The comparison where all numbers are finite, as nearly always: in few passes."""
    if worst == 0:
        return Comparison(value.numel())
    wrong = error > bound
    worst_ulp = float((error / spacing(expected, dtype)).max()) if dtype in FORMATS else worst
    problem = _describe(value, expected, bound, wrong) if bool(wrong.any()) else None
    ratio = error.div_(bound).masked_fill_(error == 0, 0.0)
    return _judged(ratio, worst_ulp, problem, shared)


def _judged(ratio: Tensor, worst_ulp: float, problem: str | None, shared: bool) -> Comparison:
    norm, biased = _row_norm(ratio)
    biased = None if shared else biased
    return Comparison(ratio.numel(), worst_ulp, float(ratio.max()), problem or biased, norm)


def _row_norm(ratio: Tensor) -> tuple[float, str | None]:
    """The largest norm of a row's shares of the bound, and what is wrong with it, if anything.

    Elements without an error (exact ones, and those of rows that are equal by construction) say nothing of a bias.
    """
    if ratio.dim() == 0 or ratio.shape[-1] < NORM_COUNT:
        return 0.0, None
    rows = torch.nan_to_num(ratio, nan=0.0, posinf=0.0).flatten(0, -2) if ratio.dim() > 1 else ratio[None]
    count = torch.count_nonzero(rows, dim=-1)
    norms = torch.where(count >= NORM_COUNT, ((rows * rows).sum(-1) / count.clamp_min(1)).sqrt(), 0.0)
    for row in torch.nonzero(norms > NORM_LIMIT).flatten().tolist():
        if len(torch.unique(rows[row])) > NORM_COUNT // 2:
            norm = f"{float(norms[row]):.3f} of their bounds, more than {NORM_LIMIT}"
            return float(norms.max()), f"row {row}: the errors have a norm of {norm}: a bias, though each is in bounds"
    return float(norms.max()), None


def compare_ids(got: Tensor, expected: AcceptableIds) -> Comparison:
    """Chosen ids against the acceptable ones; -1 exactly where a row is invalid."""
    rows, vocab = expected.allowed.shape
    if got.shape != (rows,):
        return Comparison(0, problem=f"shape {tuple(got.shape)}, expected ({rows},)")
    if rows == 0:
        return Comparison(0)
    inside = (got >= 0) & (got < vocab)
    chosen = torch.where(inside, got, torch.zeros_like(got))
    allowed = expected.allowed[torch.arange(rows), chosen] if vocab else torch.zeros(rows, dtype=torch.bool)
    good = torch.where(expected.invalid, got == -1, inside & allowed)
    if bool(good.all()):
        return Comparison(rows)
    texts = []
    for i in torch.nonzero(~good).flatten().tolist()[:SHOWN]:
        if bool(expected.invalid[i]):
            want = "-1"
        else:
            ids = torch.nonzero(expected.allowed[i]).flatten().tolist()
            want = f"one of {ids[:5]}{' ...' if len(ids) > 5 else ''}"
        texts.append(f"row {i}: got {int(got[i])}, expected {want}")
    return Comparison(rows, problem=f"{int((~good).sum())} of {rows} rows wrong; " + "; ".join(texts))


def _describe(value: Tensor, expected: Tensor, bound: Tensor, wrong: Tensor) -> str:
    texts = []
    places = torch.nonzero(wrong)
    for place in places[:SHOWN]:
        at = tuple(place.tolist())
        texts.append(
            f"{list(at)}: got {float(value[at])!r}, expected {float(expected[at])!r} +- {float(bound[at]):.3e}"
        )
    return f"{len(places)} of {value.numel()} elements wrong; " + "; ".join(texts)
