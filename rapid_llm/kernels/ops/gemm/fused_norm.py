"""Native `rmsnorm_linear` and `rmsnorm_linear_silu_and_mul`: the ops that they stand for, one after another.

What passes between them is rounded to input's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_llm.kernels.ops.activation.silu_and_mul import _launch as launch_silu
from rapid_llm.kernels.ops.activation.silu_and_mul import silu_and_mul
from rapid_llm.kernels.ops.arguments import check_disjoint, check_tensor, check_written
from rapid_llm.kernels.ops.gemm.fused_residual import check_product
from rapid_llm.kernels.ops.gemm.linear import _launch_dense, linear
from rapid_llm.kernels.ops.layernorm.rmsnorm import _launch as launch_norm
from rapid_llm.kernels.ops.layernorm.rmsnorm import rmsnorm
from rapid_llm.kernels.ops.triton_support import attempt, use_triton
from rapid_llm.kernels.registry import ArgumentError


def rmsnorm_linear(
    input: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
) -> Tensor:
    """rmsnorm(input) @ weight.T + bias. See `rapid_llm.kernels.rmsnorm_linear`."""
    _check("rmsnorm_linear", input, norm_weight, weight)
    shape = (*input.shape[:-1], weight.shape[0])
    if bias is not None:
        check_tensor("rmsnorm_linear", "bias", bias, input, shape[-1:])
    _check_out("rmsnorm_linear", out, shape, input=input, norm_weight=norm_weight, weight=weight, bias=bias)
    if use_triton("rmsnorm_linear", input):
        result = torch.empty(shape, dtype=input.dtype, device=input.device) if out is None else out
        if attempt("rmsnorm_linear", _launch, input, norm_weight, weight, bias, eps, result):
            return result
    return linear(rmsnorm(input, norm_weight, eps), weight, bias, out)


def rmsnorm_linear_silu_and_mul(
    input: Tensor, norm_weight: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None
) -> Tensor:
    """silu(gate) * up of rmsnorm(input) @ weight.T. See `rapid_llm.kernels.rmsnorm_linear_silu_and_mul`."""
    op = "rmsnorm_linear_silu_and_mul"
    _check(op, input, norm_weight, weight)
    half, odd = divmod(weight.shape[0], 2)
    if odd:
        raise ArgumentError(f"{op}: weight holds rows of gate and of up, as many of each: got {tuple(weight.shape)}")
    shape = (*input.shape[:-1], half)
    _check_out(op, out, shape, input=input, norm_weight=norm_weight, weight=weight)
    if use_triton(op, input):
        result = torch.empty(shape, dtype=input.dtype, device=input.device) if out is None else out
        if attempt(op, _launch_gated, input, norm_weight, weight, eps, result):
            return result
    return silu_and_mul(linear(rmsnorm(input, norm_weight, eps), weight), out)


def _check(op: str, input: Tensor, norm_weight: Tensor, weight: Tensor) -> None:
    check_product(op, input, weight)
    row = tuple(input.shape[-1:])
    if norm_weight.shape != row:
        got = tuple(norm_weight.shape)
        raise ArgumentError(f"{op}: norm_weight must have the same shape as a row of input, {row}: got {got}")
    if norm_weight.device != input.device:
        text = f"{op}: norm_weight is on {norm_weight.device}, input on {input.device}; CUDA and CPU do not mix"
        raise ArgumentError(text)
    if norm_weight.dtype not in (torch.float32, input.dtype):
        wanted = "torch.float32" if input.dtype is torch.float32 else f"{input.dtype} or torch.float32"
        raise ArgumentError(f"{op}: norm_weight must have dtype {wanted}, got {norm_weight.dtype}")


def _check_out(op: str, out: Tensor | None, shape: tuple[int, ...], input: Tensor, **others: Tensor | None) -> None:
    """Raise unless `out` is of `shape` and input's dtype, and shares no memory with what is read."""
    if out is None:
        return
    check_tensor(op, "out", out, input, shape)
    check_written(op, "out", out)
    for name, tensor in {"input": input, **others}.items():
        if tensor is not None:
            check_disjoint(op, "out", out, name, tensor)


def _launch(input: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
    normed = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    launch_norm(input, norm_weight, eps, normed)
    _launch_dense(normed, weight, bias, out)


def _launch_gated(input: Tensor, norm_weight: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    both = torch.empty((*input.shape[:-1], weight.shape[0]), dtype=input.dtype, device=input.device)
    _launch(input, norm_weight, weight, None, eps, both)
    launch_silu(both, out)
