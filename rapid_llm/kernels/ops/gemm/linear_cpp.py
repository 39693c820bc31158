"""`cpp/linear.<scheme>`: GGUF blocks that stay as they are, decoded in C++; no copy of the weight is kept.

Why C++: see csrc/gemm/linear_blocks.cpp. `linear` decodes the weight in registers, once per four tokens, which wins
while there are few; `linear_gemm` and `linear_gemm_bf16` dequantise a bounded piece at a time into scratch memory that
stays in the cache and multiply it by torch's GEMM, which wins while there are many.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import load_cpp
from rapid_llm.kernels.ops.arguments import check_tensor
from rapid_llm.kernels.ops.gemm._cpp_rows import answer, check_out, memory_for, rows_of
from rapid_llm.kernels.registry import ArgumentError

SCRATCH_ELEMENTS: Final = 2**21
"""Weights dequantised at a time: 8 MiB of fp32, well inside a last-level cache."""

_SCHEMES: Final = ("q8_0", "q4_0", "q4_1")
_library: Final = load_cpp("linear_blocks", "gemm/linear_blocks.cpp")
_int16: Final = load_cpp("linear_blocks_int16", "gemm/linear_blocks_int16.cpp")
_NAMES: Final = {s: (f"linear_{s}", f"linear_int16_{s}", f"dequantise_{s}") for s in _SCHEMES}
"""The modules' functions: on fp32, on rounded input, and the one that writes dense rows."""


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """input (..., in_features) fp32 times blocks (out_features, bytes) uint8; see the op. Last dimensions are dense."""
    return _decode(input, weight, bias, out, scheme, False)


def linear_int16(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """The same with the input rounded to int16 per block of 32; an input with NaN or infinities is not rounded."""
    return _decode(input, weight, bias, out, scheme, True)


def _decode(
    input: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, scheme: str, rounded: bool
) -> Tensor:
    names = _names(scheme)
    rows = rows_of(input)
    product = memory_for(input, rows, weight, out)
    dense_bias = bias if bias is None or bias.is_contiguous() else bias.contiguous()
    threads = torch.get_num_threads()
    if not (rounded and getattr(_int16, names[1])(product, rows, weight, dense_bias, threads)):
        getattr(_library, names[0])(product, rows, weight, dense_bias, threads)
    return answer(input, product, out)


def linear_gemm(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """The same by fp32 GEMM over dequantised pieces of the weight."""
    return _gemm(input, weight, bias, out, scheme, torch.float32)


def linear_gemm_bf16(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """The same by bf16 GEMM: input, weight and result are rounded to bf16.

    A layer with a bias takes the fp32 GEMM: the bias must be added before the result is rounded.
    """
    return _gemm(input, weight, bias, out, scheme, torch.bfloat16 if bias is None else torch.float32)


def _gemm(
    input: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, scheme: str, dtype: torch.dtype
) -> Tensor:
    dequantise = getattr(_library, _names(scheme)[2])
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


def _names(scheme: str) -> tuple[str, str, str]:
    try:
        return _NAMES[scheme]
    except KeyError:
        raise ArgumentError(f"linear: scheme must be one of {', '.join(_SCHEMES)}: got {scheme!r}") from None
