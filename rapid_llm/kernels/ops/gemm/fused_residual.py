"""Native `linear_add`: the product of `native/linear` in fp32, added to the residual by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_llm.kernels.ops.arguments import check_disjoint, check_kind, check_tensor, check_written
from rapid_llm.kernels.ops.gemm.linear import _launch_dense
from rapid_llm.kernels.ops.gemm.precision import exact_linear
from rapid_llm.kernels.ops.triton_support import attempt, use_triton
from rapid_llm.kernels.registry import ArgumentError

PIECE = 2**19
"""Weights that are widened at a time: 2 MiB of fp32."""


def linear_add(input: Tensor, weight: Tensor, residual: Tensor) -> None:
    """residual += input @ weight.T, in place. See `rapid_llm.kernels.linear_add`."""
    check_product("linear_add", input, weight)
    check_tensor("linear_add", "residual", residual, input, (*input.shape[:-1], weight.shape[0]))
    check_written("linear_add", "residual", residual)
    check_disjoint("linear_add", "residual", residual, "input", input)
    check_disjoint("linear_add", "residual", residual, "weight", weight)
    if use_triton("linear_add", input):
        product = torch.empty(residual.shape, dtype=torch.float32, device=input.device)
        if attempt("linear_add", _launch_dense, input, weight, None, product):
            residual.copy_(product.add_(residual))
            return
    if input.dtype is torch.float32:
        residual.add_(exact_linear(_flat(input), weight).view(residual.shape))
    else:
        residual.copy_(_wide(_flat(input), weight).view(residual.shape).add_(residual))


def check_product(op: str, input: Tensor, weight: Tensor) -> None:
    """Raise unless `input` has a last dimension, and `weight` rows of as many elements, dense in its dtype."""
    if weight.dim() != 2 or input.dim() == 0:
        raise ArgumentError(
            f"{op}: input needs a last dimension and weight two dimensions, got {tuple(input.shape)} and "
            f"{tuple(weight.shape)}"
        )
    check_kind(op, "weight", weight, input)
    if weight.shape[1] != input.shape[-1]:
        raise ArgumentError(
            f"{op}: weight and input do not meet in the same shape: input {tuple(input.shape)} takes weight rows of "
            f"{input.shape[-1]}, got {tuple(weight.shape)}"
        )


def _flat(input: Tensor) -> Tensor:
    """(rows, in_features): all dimensions of the input but the last are one."""
    return input.flatten(0, -2) if input.dim() > 1 else input[None]


def _wide(rows: Tensor, weight: Tensor) -> Tensor:
    """(rows, outputs) in fp32 for 16-bit operands, a bounded piece of the weight at a time."""
    wide, count = rows.float(), max(1, PIECE // max(weight.shape[1], 1))
    parts = [exact_linear(wide, weight[first : first + count].float()) for first in range(0, weight.shape[0], count)]
    return parts[0] if len(parts) == 1 else torch.cat([wide.new_empty(wide.shape[0], 0), *parts], -1)
