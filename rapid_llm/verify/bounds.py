"""How far a row may be from its oracle: absolute bounds derived from the arithmetic that the op promises, never chosen.

`bound(args, expected, roundings)` gives one float64 tensor per expected tensor. Each is a worst case over every order
of summation, plus half an ulp of the output's dtype, plus the intermediate roundings that the row declares
(`KernelSpec.roundings`). A correctly rounded result always passes, at every exponent. Where a sum is exact in fp32
(small integers), the bound knows it and shrinks to the rounding of the store alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import FP8, FP8_CHANNEL, INT4_GROUPS, INT8_CHANNEL
from rapid_llm.verify.formats import Blocks, unpack
from rapid_llm.verify.rounding import (
    DIVISION,
    RSQRT,
    SUBNORMAL,
    TINY,
    U,
    argument_rounding,
    distance,
    exp_error,
    finish,
    flush,
    fp32_rounding,
    gamma,
)
from rapid_llm.verify.ulp import E4M3, half_ulp, lowest_bit

Args = dict[str, Any]


def _f64(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64)


def scale(args: Args, expected: Tensor, roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """factor to fp32 (its own rounding error, none if it is an fp32 number), the product to fp32, then the store.

    The product's rounding is the store's where the output is fp32.
    """
    factor = torch.tensor(float(args["factor"]), dtype=torch.float64)
    entry = _f64(args["input"]).abs() * distance(factor, torch.float32)
    slack = torch.nan_to_num(entry, nan=0.0, posinf=0.0)
    if args["input"].dtype != torch.float32:
        slack = slack + torch.where(slack > 0, expected.abs() * U, fp32_rounding(expected))
    return (finish(expected, slack, args["input"].dtype, roundings),)


def silu_and_mul(args: Args, expected: Tensor, roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """z / (1 + e) * up with e = exp(-z).

    e's relative error r reaches 1 + e as r e / (1 + e); then the addition (U), the division and two products (3 U,
    one spare for z * (1 / (1 + e))). exp(-z) above 2**126 may overflow, or its reciprocal be flushed, so that the
    sigmoid, which is then below 2**-126, becomes 0: that much times |z up| is added. A product below the normal
    numbers loses half a subnormal step, which `up` then scales. Flushes, if declared, lose up to 2**-126 of the gate or
    its sigmoid product, times |up|, and of up, times |z|.
    """
    tensor = args["input"]
    half = tensor.shape[-1] // 2
    gate, up = _f64(tensor[..., :half]), _f64(tensor[..., half:])
    share = torch.sigmoid(-gate)  # e / (1 + e)
    relative = share * exp_error(gate) + U + DIVISION + 3 * U
    slack = expected.abs() * relative * (1 + 16 * U) + (gate * up).abs() * 2 * TINY + (1 + up.abs()) * SUBNORMAL
    slack = slack + (2 * up.abs() + gate.abs()) * flush(roundings)
    return (finish(expected, slack, tensor.dtype, roundings),)


def gelu_and_mul(args: Args, expected: Tensor, roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """As silu_and_mul, with e = exp(-w) and w = 2 sqrt(2 / pi) z (1 + 0.044715 z**2).

    The terms of w have one sign, so it errs relatively by 8 U at most, whichever way it is computed: two constants,
    four products, a sum, and one spare. The exponential's argument brings that much of |w| into e.
    """
    tensor = args["input"]
    half = tensor.shape[-1] // 2
    gate, up = _f64(tensor[..., :half]), _f64(tensor[..., half:])
    w = math.sqrt(8.0 / math.pi) * (gate + 0.044715 * gate**3)
    share = torch.sigmoid(-w)  # e / (1 + e)
    relative = torch.nan_to_num(share * torch.expm1(exp_error(w) + 8 * U * w.abs()), posinf=0.0) + U + DIVISION + 3 * U
    slack = expected.abs() * relative * (1 + 16 * U) + (gate * up).abs() * 2 * TINY + (1 + up.abs()) * SUBNORMAL
    return (finish(expected, slack, tensor.dtype, roundings),)


def _rmsnorm_relative(values: Tensor, entry: float) -> Tensor:
    """Relative error of values * rsqrt(mean(values**2) + eps) * weight; `entry` is the relative error of each value.

    The sum of n squares is positive, so it errs relatively by gamma(n) + 2 entry; the division by n and the additions
    of eps (itself rounded to fp32) by 3 U. The square root halves it. Two products, and the entry error of the value
    itself, follow. Zeros add without error, so n counts the others.
    """
    terms = (values != 0).sum(-1, keepdim=True).to(torch.float64)
    return 0.5 * (gamma(terms) + 2 * entry + 3 * U) * (1 + 1e-3) + RSQRT + 2 * U + entry


def _underflow(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Products below the normal numbers lose up to half a subnormal step, which the other factor then scales."""
    root = 1.0 / torch.sqrt((values * values).mean(-1, keepdim=True) + eps)
    return torch.nan_to_num((1.0 + weight.abs() + root) * SUBNORMAL, nan=0.0, posinf=0.0)


def _declared_in_norm(values: Tensor, weight: Tensor, eps: float, roundings: tuple[str, ...]) -> Tensor:
    """What declared roundings of the weight and flushes move: each weight by its own distance, times the normalised
    value; each operand and product by up to 2**-126, times the other factors; the sum of squares by that per value."""
    mean = (values * values).mean(-1, keepdim=True) + eps
    root = 1.0 / torch.sqrt(mean)
    moved = (values * root).abs() * argument_rounding(weight, roundings, "weight")
    lost = flush(roundings)
    if lost:
        scaled = (values * root).abs()
        moved = moved + lost * (2 * weight.abs() * (1 + root) + scaled + scaled * weight.abs() / mean)
    return torch.nan_to_num(moved, nan=0.0, posinf=0.0)


def rmsnorm(args: Args, expected: Tensor, roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """See `_rmsnorm_relative`, `_underflow` and `_declared_in_norm`; input and weight are exact in fp32."""
    values, weight, eps = _f64(args["input"]), _f64(args["weight"]), args.get("eps", 1e-6)
    slack = expected.abs() * _rmsnorm_relative(values, 0.0) + _underflow(values, weight, eps)
    slack = slack + _declared_in_norm(values, weight, eps, roundings)
    return (finish(expected, slack, args["input"].dtype, roundings),)


def fused_add_rmsnorm(
    args: Args, expected: tuple[Tensor, Tensor], roundings: tuple[str, ...] = ()
) -> tuple[Tensor, ...]:
    """The sum is rounded to fp32 (U), then stored; the norm reads the fp32 sum."""
    normed, total = expected
    dtype = args["input"].dtype
    rounded = fp32_rounding(total)
    entry = U if bool((rounded > 0).any()) else 0.0
    weight, eps = _f64(args["weight"]), args.get("eps", 1e-6)
    slack = normed.abs() * _rmsnorm_relative(total, entry) + _underflow(total, weight, eps)
    slack = slack + _declared_in_norm(total, weight, eps, roundings)
    rounded = torch.zeros_like(total) if dtype == torch.float32 else rounded
    stored = finish(total, rounded + 2 * flush(roundings), dtype, roundings)
    return finish(normed, slack, dtype, roundings), stored


def rope(args: Args, expected: tuple[Tensor, Tensor], roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """a cos - b sin: two products and a sum, gamma(2) (|a cos| + |b sin|), and half a subnormal step for each product.

    Flushes, if declared, lose up to 2**-126 of each operand, times the other, and of each product. What is not rotated
    must be equal.
    """
    cache = args["cos_sin_cache"]
    rotary = cache.shape[-1]
    table = _f64(cache)[args["positions"].to(torch.int64)].abs()
    cos, sin = table[:, None, : rotary // 2], table[:, None, rotary // 2 :]
    interleaved = bool(args.get("interleaved", False))
    first = slice(0, rotary, 2) if interleaved else slice(0, rotary // 2)
    second = slice(1, rotary, 2) if interleaved else slice(rotary // 2, rotary)
    bounds = []
    for name, result in zip(("query", "key"), expected, strict=True):
        tensor = _f64(args[name]).abs()
        slack = torch.zeros_like(result)
        slack[..., first] = gamma(2) * (tensor[..., first] * cos + tensor[..., second] * sin)
        slack[..., second] = gamma(2) * (tensor[..., second] * cos + tensor[..., first] * sin)
        largest = tensor[..., :rotary].amax(-1, keepdim=True) if rotary else torch.zeros_like(tensor[..., :1])
        slack = slack + torch.nan_to_num(4 + 2 * largest, nan=0.0, posinf=0.0) * flush(roundings)
        bound = finish(result, slack + SUBNORMAL, args[name].dtype, roundings)
        bound[..., rotary:] = 0.0
        bounds.append(bound)
    return tuple(bounds)


_FLOAT_SCALED = (FP8, FP8_CHANNEL, INT8_CHANNEL)
"""Schemes with fp32 scales: a code times its scale does not fit fp32."""

_OFFSETS = ("q4_1", "q5_1", "q2_k", "q4_k", "q5_k", *INT4_GROUPS)
"""Schemes that add something to a code times its scale."""

_ROW_SCALED = (FP8_CHANNEL, INT8_CHANNEL)
"""Schemes whose scale a row may apply to a sum of products, one more rounding for each of its terms."""


def _code_error(blocks: Blocks, scheme: str) -> Tensor:
    """fp32 error of w = d q + m; 0 where all of it is an fp32 number.

    A code times an fp32 scale is rounded once, whatever `m` is. Of GGUF's formats d q is exact (11 + 8 bits; 11 + 6 + 6
    where groups have scales), as is a minimum, so the sum is rounded once; q4_1 may also be computed as d (q - 8) +
    (m + 8 d), which rounds the shifted offset as well. int4 is d (q - z), both rounded where z is no integer, or a sum
    of two exact products.
    """
    value = blocks.quant * blocks.scale + blocks.offset
    entry = torch.zeros_like(value)
    if scheme == "q4_1":
        shifted = torch.where(blocks.offset != 0, blocks.offset + 8 * blocks.scale, torch.zeros_like(blocks.offset))
        entry = fp32_rounding(shifted).expand_as(value)
    elif scheme in INT4_GROUPS:
        code = torch.where(blocks.scale != 0, value / blocks.scale, torch.zeros_like(value))
        entry = fp32_rounding(code) * blocks.scale.abs()
    elif scheme not in _FLOAT_SCALED and scheme not in _OFFSETS:
        return entry
    exact = (entry == 0) & (fp32_rounding(value) == 0)
    return torch.where(exact, torch.zeros_like(value), entry + (value.abs() + entry) * U)


def embedding(args: Args, expected: Tensor, roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """Dense rows are copied (one rounding if the dtype changes); d q + m is computed in fp32 first (`_code_error`)."""
    weight, scheme = args["weight"], args.get("scheme", "unquantized")
    dtype = args.get("dtype") or (weight.dtype if scheme == "unquantized" else torch.float32)
    slack = torch.zeros_like(expected)
    if scheme != "unquantized" and expected.numel():
        ids = args["input"].reshape(-1).to(torch.int64)
        inside = (ids >= 0) & (ids < weight.shape[0])
        error = _code_error(unpack(weight[torch.where(inside, ids, torch.zeros_like(ids))], scheme), scheme)
        slack = torch.where(inside[:, None], error.reshape(ids.numel(), -1), 0.0).reshape(expected.shape)
    return (finish(expected, slack, dtype, roundings),)


def _weight(args: Args, roundings: tuple[str, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(weight, magnitude, error, quantum per row): magnitude bounds the terms into which a row may split each
    weight."""
    tensor, scheme = args["weight"], args.get("scheme", "unquantized")
    if scheme == "unquantized":
        value = _f64(tensor)
        return value, value.abs(), argument_rounding(value, roundings, "weight"), _row_quantum(value)
    blocks = unpack(tensor, scheme)
    value = blocks.values()
    error = _code_error(blocks, scheme).reshape(value.shape) + distance(value, args["input"].dtype)
    error = error + argument_rounding(value, roundings, "weight")
    if scheme in _FLOAT_SCALED:  # the codes of fp8 have fractions
        return value, value.abs(), error, _row_quantum(value)
    magnitude = (blocks.quant * blocks.scale).abs() + blocks.offset.abs()
    if scheme == "q4_1":
        shifted = ((blocks.quant - 8) * blocks.scale).abs() + (blocks.offset + 8 * blocks.scale).abs()
        magnitude = torch.maximum(magnitude, shifted)
    parts = torch.cat((blocks.scale.flatten(1), blocks.offset.flatten(1)), dim=1)
    return value, magnitude.reshape(value.shape), error, _row_quantum(parts)


def _row_quantum(matrix: Tensor) -> Tensor:
    """The largest power of two of which every value of each row is a multiple; +inf for a row of zeros."""
    if matrix.shape[-1] == 0:
        return torch.full(matrix.shape[:-1], float("inf"), dtype=torch.float64)
    return lowest_bit(matrix).amin(-1)


def linear(args: Args, expected: Tensor, roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """gamma(n) sum |x w| over the n terms that aren't 0, plus what rounding the weight and the input moves.

    A quantised weight may be rounded to the input's dtype or kept in fp32; both are within |w - round(w)| of the
    exact one. With errors dx, dw of the operands, x w moves by at most |x| dw + |w| dx + dx dw. Where all products
    are multiples of q and their magnitudes add up to no more than 2**24 q, every order of summation is exact, and the
    first term is 0. Else a product below 2**-126 may be flushed (BF16 instructions of x86 and ex2.approx do so),
    which adds that much for each term.
    """
    x = _f64(args["input"]).reshape(-1, args["input"].shape[-1])
    w, magnitude, dw, w_quantum = _weight(args, roundings)
    dx = argument_rounding(x, roundings, "input")
    total = x.abs() @ magnitude.T
    count = (x != 0).to(torch.float64) @ (magnitude != 0).to(torch.float64).T
    if args.get("scheme", "unquantized") in _OFFSETS:
        count = 2 * count  # d q and m are two terms
    elif args.get("scheme") in _ROW_SCALED:
        count = count + 1
    quantum = _row_quantum(x)[:, None] * w_quantum[None, :]
    bias = args.get("bias")
    if bias is not None:
        total, count = total + _f64(bias).abs(), count + 1
        quantum = torch.minimum(quantum, lowest_bit(_f64(bias)))
    exact = (total <= quantum * 2.0**24) & (quantum >= TINY)
    slack = torch.where(exact, torch.zeros_like(total), gamma(count) * total + count * TINY)
    moved = x.abs() @ dw.T + dx @ w.abs().T + dx @ dw.T
    slack = (slack + moved * (1 + gamma(count))).reshape(expected.shape)
    return (finish(expected, slack, args["input"].dtype, roundings),)


def kvcache_write(args: Args, expected: tuple[Tensor, Tensor], roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """Copies are exact."""
    del args, roundings
    return tuple(torch.zeros_like(e) for e in expected)


def rope_kvcache_write(args: Args, expected: tuple[Tensor, ...], roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """As rope; a key's bound goes with it into its slot, and the rest of the caches is exact.

    Into a cache of e4m3 a key is rounded once more, by half a step where it may stand after the first rounding: 2**-4
    of its binade, or 2**-10 below the normal numbers.
    """
    query, key = rope(args, (expected[0], expected[1]), roundings)
    stored = key
    if args["k_cache"].dtype == E4M3:
        stored = key + half_ulp(torch.nan_to_num(expected[1].abs(), nan=0.0, posinf=0.0) + key, E4M3)
    slots, page_size = args["slot_mapping"].to(torch.int64), args["k_cache"].shape[1]
    kept = slots >= 0
    k_cache, v_cache = (torch.zeros_like(e) for e in expected[2:])
    k_cache[slots[kept] // page_size, slots[kept] % page_size] = stored[kept]
    return query, key, k_cache, v_cache


def sample(args: Args, expected: Any, roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """A choice has no distance: the oracle's set of acceptable ids carries the slack already."""
    del args, expected, roundings
    return ()
