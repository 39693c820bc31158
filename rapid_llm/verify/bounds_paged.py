"""How far attention over a paged cache may be from its oracle; see `bounds`, of which this is a part."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rapid_llm.verify.oracles import gather_keys, visible_keys
from rapid_llm.verify.rounding import DIVISION, TINY, U, declared, exp_error, finish, gamma
from rapid_llm.verify.ulp import FORMATS

Args = dict[str, Any]


def _f64(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64)


class _Rounded(NamedTuple):
    """What attention rounds in between: unit roundoff and half the smallest step, of the weights and of partial
    results."""

    probs: float
    probs_step: float
    partials: float
    partials_step: float


def rounded(roundings: tuple[str, ...]) -> _Rounded:
    return _Rounded(*_declared_unit(roundings, "probs"), *_declared_unit(roundings, "partials"))


def _declared_unit(roundings: tuple[str, ...], argument: str) -> tuple[float, float]:
    formats = [FORMATS[dtype] for dtype in declared(roundings, argument)]
    return sum(f.unit for f in formats), sum(f.tiny * f.unit for f in formats)


def _capped(scores: Tensor, error: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """(c tanh(s / c), its error) for scores s that err by `error`.

    The slope of the cap is 1 - tanh(s / c)**2 and falls with |s|, so it is taken where |s| may be least. The quotient,
    whose relative error (3 U by a reciprocal, c rounded to fp32) tanh never enlarges, tanh itself (the native rows' is
    within 12 U, libraries' within 2), c rounded again and the product: 20 U of the result.
    """
    ratio = torch.nan_to_num((scores.abs() - error).clamp_min(0.0)) / softcap
    slope = 1.0 - torch.tanh(ratio) ** 2
    value = softcap * torch.tanh(scores / softcap)
    return value, torch.minimum(error * slope, torch.full_like(error, 2 * softcap)) + 20 * U * value.abs()


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first_visible: int,
    scale: float,
    rounded: _Rounded,
    page: int = 0,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Error of softmax(q k scale) v before the store, (q, heads, head_dim).

    A score errs by gamma(D + 4) scale sum |q k| (the products and sums, the factor, a factor log2(e) and its
    roundings), a capped one as `_capped` says. A weight exp(s - m) then errs relatively by its own score's error,
    3 U |s - m|, the exponential, and for each of at most n / 16 + 2 rescalings of an online softmax (n keys that are
    seen, in blocks of no fewer than a page of 16) 2 ulp and a product; their arguments telescope to |s - m|, which
    `exp_error` has counted. With r the relative errors and w the exact weights, numerator and denominator move the
    result by sum w r |v| + sum w r sum w |v|; both sums err by gamma(n + rescalings); the division follows.

    Declared roundings: `probs`, of the weights before the second product and before their sum, which is then at least
    1, or after their division by it; `partials`, of the results of parts of the keys before they are joined, whose
    magnitudes add up to no more than sum w |v|, and of which there is one for a single page: its rounding is the
    store's. Each is relative, or half the smallest step of its format. Where all of 2**k visible scores are exactly 0,
    the weights are 1 or 2**-k, which every format holds.
    """
    group = query.shape[1] // keys.shape[1]
    q = _f64(query)
    k = _f64(keys).repeat_interleave(group, dim=1)
    v = _f64(values).repeat_interleave(group, dim=1).abs()
    n = keys.shape[0]
    visible = visible_keys(query.shape[0], n, first_visible, window)
    scores = torch.einsum("qhd,nhd->hqn", q, k) * scale
    score_error = torch.einsum("qhd,nhd->hqn", q.abs(), k.abs()) * (gamma(q.shape[-1] + 4) * abs(scale))
    if softcap:
        scores, score_error = _capped(scores, score_error, softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    score_error = torch.where(visible, score_error, torch.zeros_like(score_error))
    gap = scores - scores.amax(-1, keepdim=True)
    gap = torch.where(visible, gap, torch.zeros_like(gap))
    weights = torch.where(visible, torch.softmax(scores, dim=-1), torch.zeros_like(scores))
    weights = torch.nan_to_num(weights, nan=0.0)
    seen = visible.sum(-1)
    terms = int(seen.max()) if seen.numel() else 0
    rescales = terms // 16 + 2
    relative = torch.expm1(score_error + 3 * U * gap.abs() + exp_error(gap) + rescales * 5 * U)
    exact = ((seen & (seen - 1)) == 0) & (score_error == 0).all(-1)  # (heads, q)
    inexact = (~exact).to(torch.float64)[..., None]
    probs, probs_step = inexact * rounded.probs, inexact * rounded.probs_step
    partials, partials_step = (0.0, 0.0) if n <= page else (rounded.partials, rounded.partials_step)
    relative = torch.nan_to_num(relative, nan=0.0, posinf=0.0) + probs
    v = torch.nan_to_num(v, nan=0.0, posinf=0.0)
    spread = (weights * relative).sum(-1)[..., None] + terms * probs_step
    mass = torch.einsum("hqn,nhd->hqd", weights, v)
    sums = gamma(terms + rescales)
    slack = torch.einsum("hqn,nhd->hqd", weights * relative, v) + (spread + partials) * mass
    slack = slack + probs_step * v.sum(0)[:, None, :] + partials_step
    slack = slack + (2 * sums + DIVISION + U) * mass
    slack = slack / (1 - spread - sums).clamp_min(2.0**-10)
    flushed = terms * TINY * (v.amax(0) if n else torch.zeros(v.shape[1:], dtype=torch.float64))
    return (slack + flushed[:, None, :]).transpose(0, 1)


def _limits(args: Args) -> tuple[int, float]:
    return args.get("window", 0), args.get("softcap", 0.0)


def attention_prefill(args: Args, expected: Tensor, roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """See `attend`."""
    slack = torch.zeros_like(expected)
    starts = args["cu_seqlens_q"].tolist()
    for i, length in enumerate(args["seq_lens"].tolist()):
        begin, end = starts[i], starts[i + 1]
        if begin == end or length == 0:
            continue
        keys, values = (gather_keys(args[c], args["block_table"][i], length) for c in ("k_cache", "v_cache"))
        first = length - (end - begin) + 1
        query, page = args["query"][begin:end], args["k_cache"].shape[1]
        slack[begin:end] = attend(query, keys, values, first, args["scale"], rounded(roundings), page, *_limits(args))
    return (finish(expected, slack, args["query"].dtype, roundings),)


def attention_decode(args: Args, expected: Tensor, roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """See `attend`."""
    slack = torch.zeros_like(expected)
    for i, length in enumerate(args["seq_lens"].tolist()):
        if length > 0:
            keys, values = (gather_keys(args[c], args["block_table"][i], length) for c in ("k_cache", "v_cache"))
            query = args["query"][i : i + 1]
            page = args["k_cache"].shape[1]
            slack[i : i + 1] = attend(
                query, keys, values, length, args["scale"], rounded(roundings), page, *_limits(args)
            )
    return (finish(expected, slack, args["query"].dtype, roundings),)
