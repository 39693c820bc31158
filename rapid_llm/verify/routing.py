"""moe.topk and fused_moe in float64: their oracles, bounds, and the work of a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapid_llm.verify.oracles import _f64, _reference
from rapid_llm.verify.rounding import DIVISION, SUBNORMAL, TINY, U, exp_error, finish, gamma
from rapid_llm.verify.ulp import half_ulp
from rapid_llm.verify.work import Work, unique_bytes

Args = dict[str, Any]

SLOPE = 1.1
"""The steepest that z / (1 + exp(-z)) rises (1.0998, at z = 2.4)."""


def _chosen(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest in falling order, the lower id first among equals; NaN counts as -inf."""
    value = torch.where(torch.isnan(logits), float("-inf"), logits)
    taken = torch.zeros_like(value, dtype=torch.bool)
    found = []
    for _ in range(k):
        left = value.masked_fill(taken, float("-inf"))
        best = torch.where(taken, False, left == left.amax(-1, keepdim=True))
        first = best.to(torch.int8).argmax(-1)  # the first of the equal maxima
        taken[torch.arange(len(value)), first] = True
        found.append(first)
    return torch.stack(found, 1) if found else torch.empty(len(value), 0, dtype=torch.int64)


@_reference
def moe_topk(*, logits: Tensor, k: int, renormalize: bool = True) -> tuple[Tensor, Tensor]:
    """(weights, ids), both (tokens, k)."""
    exact = _f64(logits)
    ids = _chosen(exact, k)
    weights = torch.softmax(exact, -1).gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.to(torch.float64)


def moe_topk_bound(
    args: Args, expected: tuple[Tensor, Tensor], roundings: tuple[str, ...] = ()
) -> tuple[Tensor, Tensor]:
    """exp(x - m) errs relatively by the rounding of x - m (U |x - m|) and the exponential; a sum of n positive numbers
    by gamma(n) and by no more than its worst term; the quotient by 4 U. A second sum and quotient where weights are
    renormalised. Ids are exact.
    """
    weights, ids = expected
    exact = _f64(args["logits"])
    gap = torch.where(torch.isfinite(exact), exact - exact.amax(-1, keepdim=True), 0.0)
    gap = torch.nan_to_num(gap, nan=0.0, posinf=0.0, neginf=0.0)
    term = torch.expm1(U * gap.abs() + exp_error(gap))
    # What counts in a sum is a term's error times its share of it.
    share = torch.nan_to_num(torch.softmax(exact, -1), nan=0.0)
    summed = (share * term).sum(-1, keepdim=True)
    own = term.gather(-1, ids.to(torch.int64))
    relative = own + summed + gamma(exact.shape[-1]) + DIVISION
    if args.get("renormalize", True):
        relative = relative + (torch.nan_to_num(weights) * relative).sum(-1, keepdim=True)
        relative = relative + gamma(exact.shape[-1]) + DIVISION
    lost = 2 * TINY  # an exponential below the normal numbers, and the quotient of it
    if args.get("renormalize", True):
        top = torch.nan_to_num(torch.softmax(exact, -1).gather(-1, ids.to(torch.int64)).sum(-1, keepdim=True))
        lost = lost / top.clamp_min(1.0 / max(exact.shape[-1], 1))
    slack = weights.abs() * relative * (1 + 2.0**-10) + lost
    return finish(weights, slack, torch.float32, roundings), torch.zeros_like(ids)


def moe_topk_work(*, logits: Tensor, k: int, renormalize: bool = True) -> Work:
    """The logits once, an exponential and two sums for each; a comparison of each for every choice."""
    del renormalize
    tokens = logits.shape[0]
    return Work(unique_bytes(logits), tokens * k * 8, logits.numel() * (3 + k))


def _silu(z: Tensor) -> Tensor:
    return z / (1.0 + torch.exp(-z))


def _of_choices(tensor: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(the tensor's part of each choice's expert in float64, whether the choice is of an expert): (tokens, topk, ...).

    A choice of no expert has the part of the first one, which must not reach the result.
    """
    real = (ids >= 0) & (ids < tensor.shape[0])
    return _f64(tensor)[torch.where(real, ids.to(torch.int64), 0)], real


@_reference
def fused_moe(*, input: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Every choice by itself: down (silu(gate x) * (up x)), added up by the weights."""
    (first, real), (second, _) = _of_choices(gate_up, topk_ids), _of_choices(down, topk_ids)
    gate, up = torch.einsum("tkih,th->tki", first, _f64(input)).chunk(2, -1)
    found = torch.einsum("tkhi,tki->tkh", second, _silu(gate) * up) * _f64(topk_weights)[..., None]
    return torch.where(real[..., None], found, 0.0).sum(1)


def fused_moe_bound(args: Args, expected: Tensor, roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """Two linears with silu_and_mul between them, and a weighted sum; the terms are those of their own bounds.

    g and u, sums of n products, err by dg, du = gamma(n) sum |w x| and may lose a product below 2**-126 each. silu(g)
    errs by 1.1 dg and as in `bounds.silu_and_mul`; its product h with u by ds |u| + |s| du + ds du and one rounding,
    and it may be rounded to the input's dtype. The second sum errs by gamma(n) sum |w| (|h| + dh) + sum |w| dh, and so
    does the third with the weights of the choices, each of whose products is one rounding more.
    """
    x, ids, factors = _f64(args["input"]), args["topk_ids"], _f64(args["topk_weights"]).abs()[..., None]
    dtype, inter, features = args["input"].dtype, args["down"].shape[2], x.shape[1]
    (first, real), (second, _) = _of_choices(args["gate_up"], ids), _of_choices(args["down"], ids)
    gate, up = torch.einsum("tkih,th->tki", first, x).chunk(2, -1)
    error = torch.einsum("tkih,th->tki", first.abs(), x.abs()) * gamma(features) + features * TINY
    dg, du = error.chunk(2, -1)
    silu = _silu(gate)
    ds = SLOPE * dg + silu.abs() * (torch.sigmoid(-gate) * exp_error(gate) + 2 * U + DIVISION) + gate.abs() * TINY
    h = (silu * up).abs()
    dh = ds * up.abs() + silu.abs() * du + ds * du + U * h + SUBNORMAL
    if dtype != torch.float32:
        dh = dh + half_ulp(torch.nan_to_num(h + dh, nan=0.0, posinf=0.0), dtype)
    size = torch.einsum("tkhi,tki->tkh", second.abs(), h + dh)
    dy = torch.einsum("tkhi,tki->tkh", second.abs(), dh) + gamma(inter) * size + inter * TINY
    terms = real.sum(1)[:, None, None] + 1
    slack = torch.where(real[..., None], factors * (dy + gamma(terms) * (size + dy)) + TINY, 0.0).sum(1)
    return (finish(expected, torch.nan_to_num(slack, nan=0.0, posinf=0.0), dtype, roundings),)


def fused_moe_work(*, input: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Work:
    """The weights of every expert that is chosen, once; 6 operations for each weight of a choice."""
    experts, hidden, inter = down.shape
    real = topk_ids[(topk_ids >= 0) & (topk_ids < experts)]
    weights = int(real.unique().numel()) * 3 * inter * hidden * down.element_size()
    read = unique_bytes(input) + weights + unique_bytes(topk_weights) + unique_bytes(topk_ids)
    flops = int(real.numel()) * (6 * inter * hidden + 5 * inter + 2 * hidden)
    return Work(read, input.numel() * input.element_size(), flops)
