"""`cpp/linear.bf16` and `cpp/linear.fp16`: dense weights, for few rows of input; see csrc/gemm/linear_dense.cpp."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import load_cpp
from rapid_llm.kernels.ops.gemm._cpp_rows import answer, memory_for, rows_of
from rapid_llm.kernels.registry import ArgumentError

_library: Final = load_cpp("linear_dense", "gemm/linear_dense.cpp")


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """input (..., in_features) bf16 or fp16 times a weight of its dtype; the last dimension of both is dense."""
    if scheme != "unquantized":
        raise ArgumentError(f"linear: scheme must be unquantized, got {scheme!r}")
    rows = rows_of(input)
    product = memory_for(input, rows, weight, out)
    dense_bias = bias if bias is None or bias.is_contiguous() else bias.contiguous()
    _library.linear_dense(product, rows, weight, dense_bias, torch.get_num_threads())
    return answer(input, product, out)
