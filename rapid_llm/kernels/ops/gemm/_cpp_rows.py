"""What the C++ rows of linear share: their launchers take rows of input and write dense rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.arguments import check_disjoint, check_tensor
from rapid_llm.kernels.registry import ArgumentError

SCRATCH_ELEMENTS: Final = 2**21
"""Weights dequantised at a time: 8 MiB of fp32, well inside a last-level cache."""

Launcher = Callable[..., Any]
"""A function of a C++ module."""


def decoded(
    launcher: Launcher,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    rounding: Launcher | None = None,
) -> Tensor:
    """input @ weight.T + bias by a launcher that decodes the weight in registers. rounding: one that is tried first,
    and says whether it took the input."""
    rows = rows_of(input)
    product = memory_for(input, rows, weight, out)
    dense_bias = bias if bias is None or bias.is_contiguous() else bias.contiguous()
    threads = torch.get_num_threads()
    if rounding is None or not rounding(product, rows, weight, dense_bias, threads):
        launcher(product, rows, weight, dense_bias, threads)
    return answer(input, product, out)


def multiplied(
    dequantise: Launcher, input: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """input @ weight.T + bias by torch's GEMM in `dtype` over pieces of the weight that `dequantise` writes."""
    given = rows_of(input)
    outputs, features = weight.shape[0], given.shape[1]
    if input.dtype is not torch.float32 or not input.is_cpu:
        raise ArgumentError(f"linear: input must be float32 on the same device, cpu: got {input.dtype}, {input.device}")
    if bias is not None:
        check_tensor("linear", "bias", bias, input, (outputs,))
    if out is not None:
        check_out(input, weight, out)
    result = input.new_empty(*input.shape[:-1], outputs) if out is None else out
    rows = given.to(dtype)
    direct = dtype is torch.float32 and result.is_contiguous()
    product = result.view(rows.shape[0], outputs) if direct else rows.new_empty(rows.shape[0], outputs)
    piece = max(1, min(outputs, SCRATCH_ELEMENTS // max(features, 1)))
    scratch, threads = rows.new_empty(piece, features), torch.get_num_threads()
    for first in range(0, max(outputs, 1), piece):
        dense = scratch[: min(piece, outputs - first)]
        dequantise(dense, weight, first, threads)
        torch.mm(rows, dense.t(), out=product[:, first : first + piece])
    if not direct:
        result.copy_(product.view(result.shape))
    return result if bias is None else result.add_(bias)


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
