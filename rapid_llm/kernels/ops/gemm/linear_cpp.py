"""`cpp/linear.<scheme>`: GGUF blocks that stay as they are, decoded in C++; no copy of the weight is kept.

Why C++: see csrc/gemm/linear_blocks.cpp. `linear` decodes the weight in registers, once per four tokens, which wins
while there are few; `linear_gemm` and `linear_gemm_bf16` dequantise a bounded piece at a time into scratch memory that
stays in the cache and multiply it by torch's GEMM, which wins while there are many.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import function, load_cpp
from rapid_llm.kernels.ops.arguments import check_disjoint, check_host, check_tensor
from rapid_llm.kernels.ops.block_formats import BLOCK, BLOCK_BYTES
from rapid_llm.kernels.registry import ArgumentError

SCRATCH_ELEMENTS: Final = 2**21
"""Weights dequantised at a time: 8 MiB of fp32, well inside a last-level cache."""

_SCHEMES: Final = ("q8_0", "q4_0", "q4_1")
_library: Final = load_cpp("linear_blocks", "gemm/linear_blocks.cpp")

_int16: Final = load_cpp("linear_blocks_int16", "gemm/linear_blocks_int16.cpp")
_LINEAR_INT16: Final = {s: function(_int16, f"linear_int16_{s}", "pnpnnnnppni", ctypes.c_int) for s in _SCHEMES}
_LINEAR: Final = {s: function(_library, f"linear_{s}", "pnpnnnnppni") for s in _SCHEMES}
_DEQUANTISE: Final = {
    (s, dtype): function(_library, f"dequantise_{s}_{label}", "pnnnpi")
    for s in _SCHEMES
    for dtype, label in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"))
}


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
    features, outputs = _check(input, weight, bias, scheme)
    rows = input if input.dim() == 2 else input.reshape(input.shape[:-1].numel(), features)
    tokens = rows.shape[0]
    dense = (
        torch.empty((tokens, outputs))
        if out is None or not out.is_contiguous()
        else _result(input, weight, outputs, out)
    )
    dense_bias = None if bias is None else bias.contiguous()
    arguments = (
        *(weight.data_ptr(), weight.stride(0), rows.data_ptr(), rows.stride(0), tokens, features, outputs),
        *(None if dense_bias is None else dense_bias.data_ptr(), dense.data_ptr(), outputs, torch.get_num_threads()),
    )
    if not (rounded and _LINEAR_INT16[scheme](*arguments)):
        _LINEAR[scheme](*arguments)
    if out is None:
        return dense if input.dim() == 2 else dense.view(*input.shape[:-1], outputs)
    return out if dense is out else _result(input, weight, outputs, out).copy_(dense.view(out.shape))


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
    features, outputs = _check(input, weight, bias, scheme)
    rows = input.reshape(input.shape[:-1].numel(), features).to(dtype)
    result = _result(input, weight, outputs, out)
    direct = dtype is torch.float32 and result.is_contiguous()
    product = result.view(rows.shape[0], outputs) if direct else torch.empty((rows.shape[0], outputs), dtype=dtype)
    piece = max(1, min(outputs, SCRATCH_ELEMENTS // max(features, 1)))
    scratch = torch.empty((piece, features), dtype=dtype)
    dequantise, threads = _DEQUANTISE[scheme, dtype], torch.get_num_threads()
    for first in range(0, outputs, piece):
        count = min(piece, outputs - first)
        start = weight.data_ptr() + first * weight.stride(0)
        dequantise(start, weight.stride(0), count, features, scratch.data_ptr(), threads)
        torch.mm(rows, scratch[:count].t(), out=product[:, first : first + count])
    if not direct:
        result.copy_(product.view(result.shape))
    return result if bias is None else result.add_(bias)


def _result(input: Tensor, weight: Tensor, outputs: int, out: Tensor | None) -> Tensor:
    """Memory for the result: new, or `out` once checked."""
    shape = (*input.shape[:-1], outputs)
    if out is None:
        return torch.empty(shape)
    check_tensor("linear", "out", out, input, shape)
    check_disjoint("linear", "out", out, "input", input)
    check_disjoint("linear", "out", out, "weight", weight)
    return out


def _check(input: Tensor, weight: Tensor, bias: Tensor | None, scheme: str) -> tuple[int, int]:
    """(in_features, out_features); raises `ArgumentError` where weight or bias does not fit the input."""
    if input.dim() == 0 or weight.dim() != 2 or scheme not in _SCHEMES:
        raise ArgumentError(
            f"linear: needs input (..., in_features), weight (out_features, bytes), a scheme of {', '.join(_SCHEMES)}: "
            f"got {tuple(input.shape)}, {tuple(weight.shape)} and {scheme!r}"
        )
    features = input.shape[-1]
    outputs, width = weight.shape
    if (
        features % BLOCK
        or width * BLOCK != features * BLOCK_BYTES[scheme]
        or input.dtype is not torch.float32
        or weight.dtype is not torch.uint8
    ):
        raise ArgumentError(
            f"linear: {scheme} weight {tuple(weight.shape)} {weight.dtype} on {weight.device} does not fit input "
            f"{tuple(input.shape)} {input.dtype} on {input.device}"
        )
    if weight.stride(1) != 1 or (input.stride(-1) != 1 and input.numel() > 0):
        raise ArgumentError(
            f"linear: input and weight must be contiguous in their last dimension, strides are "
            f"{input.stride()} and {weight.stride()}"
        )
    check_host("linear", input, weight)
    if bias is not None:
        check_host("linear", bias)
    if bias is not None and (bias.shape != (outputs,) or bias.dtype is not torch.float32):
        raise ArgumentError(f"linear: bias must be ({outputs},) float32, got {tuple(bias.shape)} {bias.dtype}")
    return features, outputs
