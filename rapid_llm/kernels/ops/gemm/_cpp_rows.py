"""What the C++ rows of linear share: their launchers take rows of input and write dense rows."""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_llm.kernels.ops.arguments import check_disjoint, check_tensor
from rapid_llm.kernels.registry import ArgumentError


def rows_of(input: Tensor) -> Tensor:
    """All leading dimensions as one."""
    if input.dim() == 2:
        return input
    if input.dim() == 0:
        raise ArgumentError("linear: input must be (..., in_features), got a scalar")
    return input.reshape(input.shape[:-1].numel(), input.shape[-1])


def memory_for(input: Tensor, rows: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    """Dense rows for the product: `out` itself where it is that."""
    if out is None:
        return input.new_empty(rows.shape[0], weight.shape[0])
    check_out(input, weight, out)
    dense = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    return dense.view(rows.shape[0], weight.shape[0])


def answer(input: Tensor, product: Tensor, out: Tensor | None) -> Tensor:
    """The product in the shape of the result, or in `out`."""
    if out is None:
        return product if input.dim() == 2 else product.view(*input.shape[:-1], product.shape[1])
    return out if out.is_contiguous() else out.copy_(product.view(out.shape))


def check_out(input: Tensor, weight: Tensor, out: Tensor) -> None:
    """Raise unless `out` may take the result; of the memory that it writes the launcher asks more."""
    check_tensor("linear", "out", out, input, (*input.shape[:-1], weight.shape[0]))
    check_disjoint("linear", "out", out, "input", input)
    check_disjoint("linear", "out", out, "weight", weight)
