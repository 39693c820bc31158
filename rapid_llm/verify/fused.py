"""linear with its neighbours, in float64: oracles, bounds, and the work of a call.

linear_add, rmsnorm_linear and rmsnorm_linear_silu_and_mul, whose bounds are those of the parts one after another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapid_llm.verify.bounds import _rmsnorm_relative, _row_quantum, _underflow
from rapid_llm.verify.oracles import _f64, _reference, _rmsnorm
from rapid_llm.verify.rounding import DIVISION, SUBNORMAL, TINY, U, distance, exp_error, finish, gamma
from rapid_llm.verify.routing import SLOPE, _silu
from rapid_llm.verify.ulp import half_ulp, lowest_bit
from rapid_llm.verify.work import Work, unique_bytes

Args = dict[str, Any]


@_reference
def linear_add(*, input: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor]:
    """residual + input @ weight.T: what residual then holds."""
    return (_f64(residual) + _f64(input) @ _f64(weight).T,)


@_reference
def rmsnorm_linear(
    *, input: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """rmsnorm(input) @ weight.T + bias; nothing is rounded on the way."""
    result = _rmsnorm(_f64(input), _f64(norm_weight), eps) @ _f64(weight).T
    return result if bias is None else result + _f64(bias)


@_reference
def rmsnorm_linear_silu_and_mul(*, input: Tensor, norm_weight: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """silu(gate) * up of the halves of rmsnorm(input) @ weight.T; nothing is rounded on the way."""
    both = _rmsnorm(_f64(input), _f64(norm_weight), eps) @ _f64(weight).T
    gate, up = both.chunk(2, -1)
    return _silu(gate) * up


def linear_add_bound(args: Args, expected: tuple[Tensor], roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """gamma(n) (|r| + sum |x w|) over the terms that aren't 0, r among them, in whatever order they are added.

    Where all of them are multiples of q and their magnitudes add up to no more than 2**24 q, every order is exact, as
    in `bounds.linear`; else a product below 2**-126 may be flushed. The product is not rounded before it is added.
    """
    x, w, residual = _f64(args["input"]), _f64(args["weight"]), _f64(args["residual"])
    total = x.abs() @ w.abs().T + residual.abs()
    count = (x != 0).to(torch.float64) @ (w != 0).to(torch.float64).T + (residual != 0)
    quantum = torch.minimum(_row_quantum(x)[..., None] * _row_quantum(w), lowest_bit(residual))
    exact = (total <= quantum * 2.0**24) & (quantum >= TINY)
    slack = torch.where(exact, torch.zeros_like(total), gamma(count) * total + count * TINY)
    return (finish(expected[0], slack, args["input"].dtype, roundings),)


def _rounded(value: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """How far a number within `error` of `value` may be from it after it was rounded to `dtype`, or was not.

    Half an ulp beyond the error. Or: how far a number is from the nearest of `dtype` changes no faster than the number
    itself does, so it is at most the distance of `value` and the error, which is then added once more. For fp32, what
    is computed in fp32 is already of it.
    """
    if dtype == torch.float32:
        return error
    largest = torch.nan_to_num(value.abs() + error, nan=0.0, posinf=0.0)
    return torch.minimum(error + half_ulp(largest, dtype), 2 * error + distance(value, dtype))


def _product(args: Args) -> tuple[Tensor, Tensor]:
    """(rmsnorm(input) @ weight.T, how far a row may be from it before it adds a bias or rounds).

    With n the normalised row and r its relative error (`bounds._rmsnorm_relative`; a row that multiplies the finished
    sum by the inverse root, instead of each value, makes the same roundings in another order), n errs by dn = r |n| and
    what products lose below the normal numbers, and by `_rounded` where it is rounded. A sum of k terms errs by
    gamma(k) sum (|n| + dn) |w| + sum dn |w|. Products below 2**-126 may be flushed; those of a row that is not
    normalised yet lose up to half a subnormal step, which the inverse root then scales.
    """
    x, scale, w = _f64(args["input"]), _f64(args["norm_weight"]), _f64(args["weight"]).abs()
    eps, dtype = args.get("eps", 1e-6), args["input"].dtype
    normed = _rmsnorm(x, scale, eps)
    plain = normed.abs() * _rmsnorm_relative(x, 0.0) + _underflow(x, scale, eps)
    error = _rounded(normed, torch.nan_to_num(plain, nan=0.0, posinf=0.0), dtype)
    count = (normed != 0).to(torch.float64) @ (w != 0).to(torch.float64).T
    slack = error @ w.T + gamma(count) * ((normed.abs() + error) @ w.T) + count * TINY
    root = 1.0 / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    slack = slack + torch.nan_to_num(root, nan=0.0, posinf=0.0) * count * SUBNORMAL
    return normed @ _f64(args["weight"]).T, torch.nan_to_num(slack, nan=0.0, posinf=0.0)


def rmsnorm_linear_bound(args: Args, expected: Tensor, roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """See `_product`. A bias is one term more of the sum, and that addition one rounding more of all of it."""
    product, slack = _product(args)
    bias = args.get("bias")
    if bias is not None:
        slack = slack + 2 * U * (product.abs() + _f64(bias).abs() + slack)
    return (finish(expected, slack, args["input"].dtype, roundings),)


def rmsnorm_linear_silu_and_mul_bound(
    args: Args, expected: Tensor, roundings: tuple[str, ...] = ()
) -> tuple[Tensor, ...]:
    """gate and up err as `_product` says, and by `_rounded` where they are rounded.

    silu(g) errs by 1.1 dg, and as in `bounds.silu_and_mul`; its product with u by ds |u| + |s| du + ds du and one
    rounding.
    """
    product, slack = _product(args)
    dtype = args["input"].dtype
    (gate, up), (dg, du) = product.chunk(2, -1), _rounded(product, slack, dtype).chunk(2, -1)
    silu = _silu(gate)
    ds = SLOPE * dg + silu.abs() * (torch.sigmoid(-gate) * exp_error(gate) + 3 * U + DIVISION) + gate.abs() * 2 * TINY
    error = ds * up.abs() + silu.abs() * du + ds * du + U * expected.abs() + (1 + up.abs()) * SUBNORMAL
    return (finish(expected, error, dtype, roundings),)


def _read(*tensors: Tensor | None) -> int:
    return sum(unique_bytes(t) for t in tensors if t is not None)


def _rows(input: Tensor) -> int:
    return input.numel() // max(input.shape[-1], 1)


def linear_add_work(*, input: Tensor, weight: Tensor, residual: Tensor) -> Work:
    """2 M N K, and an addition for each element of residual, which is read and written."""
    flops = residual.numel() * (2 * weight.shape[1] + 1)
    return Work(_read(input, weight, residual), residual.numel() * residual.element_size(), flops)


def rmsnorm_linear_work(
    *, input: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6
) -> Work:
    """Those of rmsnorm and of linear; nothing between them touches memory."""
    del eps
    results = _rows(input) * weight.shape[0]
    flops = 4 * input.numel() + results * (2 * weight.shape[1] + (0 if bias is None else 1))
    return Work(_read(input, norm_weight, weight, bias), results * input.element_size(), flops)


def rmsnorm_linear_silu_and_mul_work(*, input: Tensor, norm_weight: Tensor, weight: Tensor, eps: float = 1e-6) -> Work:
    """As rmsnorm_linear, and five operations for each pair of gate and up, of which one number is written."""
    del eps
    results = _rows(input) * (weight.shape[0] // 2)
    flops = 4 * input.numel() + results * (4 * weight.shape[1] + 5)
    return Work(_read(input, norm_weight, weight), results * input.element_size(), flops)
