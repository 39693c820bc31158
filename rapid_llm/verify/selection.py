"""Which token ids a sampler may return: a set, because fp32 cannot decide every boundary.

Greedy rows have exactly one answer. For the others each decision (top_k, top_p, min_p, and where the cumulative mass
passes the drawn number) is taken twice in float64, once leaning each way by the error that fp32 can make there. What
both agree on is certain; the rest is allowed either way. The leaning is derived from the arithmetic, as in
`rapid_llm.verify.bounds`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rapid_llm.verify.rounding import U, exp_error, gamma


class AcceptableIds(NamedTuple):
    """allowed: (rows, vocab) bool, ids that a row may return. invalid: (rows,) bool, rows whose answer must be -1."""

    allowed: Tensor
    invalid: Tensor


class _Row(NamedTuple):
    logits: Tensor  # (vocab,) float64
    mass: Tensor  # exp(z - max z), unnormalised
    error: Tensor  # relative error of each mass
    tolerance: Tensor  # relative error of any sum of masses, beyond those of its members


def acceptable_ids(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> AcceptableIds:
    """See the op `sample`; all arguments float64 but top_k, (rows, vocab) and (rows,)."""
    rows, vocab = logits.shape
    allowed = torch.zeros(rows, vocab, dtype=torch.bool, device=logits.device)
    bad = torch.isnan(logits) | (logits == float("inf"))
    invalid = bad.any(-1) | (logits == float("-inf")).all(-1)
    for i in range(rows):
        if bool(invalid[i]):
            continue
        if float(temperature[i]) == 0.0:
            allowed[i, _first(logits[i] == logits[i].amax())] = True
            continue
        row = _softmax(logits[i], float(temperature[i]))
        sure, possible = _kept(row, int(top_k[i]), float(top_p[i]), float(min_p[i]))
        allowed[i] = _drawn(row, sure, possible, float(uniform[i]))
    return AcceptableIds(allowed, invalid)


def _first(mask: Tensor) -> Tensor:
    return torch.nonzero(mask)[0, 0]


def _softmax(logits: Tensor, temperature: float) -> _Row:
    """z = logits / temperature errs by up to 3 U |z| (a reciprocal and a product), and so does its maximum."""
    scaled = logits / temperature
    top = scaled.amax()
    gap = torch.where(torch.isfinite(scaled), scaled - top, torch.zeros_like(scaled))
    argument = 3 * U * (torch.nan_to_num(scaled, neginf=0.0).abs() + top.abs()) + U * gap.abs()
    mass = torch.exp(scaled - top)
    error = torch.expm1(argument + exp_error(gap))
    return _Row(logits, mass, error, gamma((mass > 0).sum()) + 8 * U)


def _kept(row: _Row, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """(certainly kept, possibly kept) after top_k, top_p and min_p."""
    sure, possible = _top_k(row, top_k)
    if top_p < 1.0:
        low, high = _top_p(row, sure, possible, top_p)
        sure, possible = sure & low, possible & high
    if min_p > 0.0:
        # The probability relative to the largest one is the mass itself, since the largest mass is 1.
        sure = sure & ((row.mass * (1 - row.error) >= min_p * (1 + 4 * U)) | (row.mass == 1.0))
        possible = possible & ((row.mass * (1 + row.error) >= min_p * (1 - 4 * U)) | (row.mass == 1.0))
    return sure, possible


def _top_k(row: _Row, top_k: int) -> tuple[Tensor, Tensor]:
    """Ties with the k-th are kept; logits that differ by less than fp32 resolves after the division may tie as well."""
    everything = row.mass > 0
    if top_k <= 0 or top_k >= row.logits.numel():
        return everything, everything
    kth = torch.topk(row.logits, top_k).values[-1]
    sure = everything & (row.logits >= kth)
    reach = 4 * U * kth.abs()
    return sure, everything & (row.logits >= kth - reach)


def _top_p(row: _Row, sure: Tensor, possible: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """A token stays while the mass of the strictly more probable ones is below top_p of the top_k mass.

    More probable tokens than a kept one are kept by top_k as well, so that mass counts only kept tokens. Tokens whose
    masses fp32 cannot tell apart may count as more probable or as tied.
    """
    total_low = (row.mass * (1 - row.error) * sure).sum() * (1 - row.tolerance)
    total_high = (row.mass * (1 + row.error) * possible).sum() * (1 + row.tolerance)
    order = torch.argsort(row.mass, descending=True)
    mass, error = row.mass[order], row.error[order]
    # Cumulative mass of the tokens before each position, leaning down and up.
    before_low = _exclusive(mass * (1 - error)) * (1 - row.tolerance)
    before_high = _exclusive(mass * (1 + error)) * (1 + row.tolerance)
    ascending = torch.flip(mass, (0,))

    def more_probable_than(threshold: Tensor) -> Tensor:
        """How many masses lie strictly above each threshold."""
        return mass.numel() - torch.searchsorted(ascending, threshold, right=True)

    # `mass` falls along the order, so the tokens above a threshold are a prefix of it.
    clearly = more_probable_than(mass * (1 + 2 * error))
    maybe = torch.minimum(more_probable_than(mass * (1 - 2 * error)), torch.arange(mass.numel()))
    maybe = torch.minimum(maybe, _tie_start(row.logits[order]))
    low = _at(before_low, clearly, mass)
    high = _at(before_high, maybe, mass)
    keep_possible = (low < top_p * total_high * (1 + 2 * U)) | (clearly == 0)
    keep_sure = (high < top_p * total_low * (1 - 2 * U)) | (maybe == 0)
    return _scatter(keep_sure, order), _scatter(keep_possible, order)


def _tie_start(ordered: Tensor) -> Tensor:
    """For logits in falling order, the position at which each one's run of equal logits begins."""
    n = ordered.numel()
    starts = torch.ones(n, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    return torch.cummax(torch.where(starts, torch.arange(n), torch.zeros(n, dtype=torch.int64)), 0).values


def _exclusive(values: Tensor) -> Tensor:
    return torch.cumsum(values, 0) - values


def _at(cumulative: Tensor, count: Tensor, mass: Tensor) -> Tensor:
    """The mass of the first `count` tokens in the order."""
    padded = torch.cat((cumulative, cumulative[-1:] + mass[-1:]))
    return padded[count]


def _scatter(values: Tensor, order: Tensor) -> Tensor:
    result = torch.zeros_like(values)
    result[order] = values
    return result


def _drawn(row: _Row, sure: Tensor, possible: Tensor, uniform: float) -> Tensor:
    """Ids at which the cumulative kept mass may be the first to exceed uniform times the whole kept mass."""
    low, high = row.mass * (1 - row.error), row.mass * (1 + row.error)
    total_low = (low * sure).sum()
    total_high = (high * possible).sum()
    slack = row.tolerance * total_high
    before = _exclusive(low * sure)
    through = torch.cumsum(high * possible, 0)
    return possible & (before <= uniform * total_high + slack) & (through >= uniform * total_low - slack)
