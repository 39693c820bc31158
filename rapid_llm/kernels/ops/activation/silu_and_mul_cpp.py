"""`cpp/silu_and_mul`: one C++ call for dense fp32 rows; see csrc/activation/silu_and_mul.cpp."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import function, load_cpp
from rapid_llm.kernels.ops.arguments import check_disjoint, check_host, check_tensor
from rapid_llm.kernels.registry import ArgumentError

_silu_and_mul: Final = function(load_cpp("silu_and_mul", "activation/silu_and_mul.cpp"), "silu_and_mul", "pnnpi")


def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """silu_and_mul of contiguous fp32 rows; see the op."""
    check_host("silu_and_mul", input)
    if input.dim() == 0:
        raise ArgumentError("silu_and_mul: input must have a last dimension, got a scalar")
    features = input.shape[-1] // 2
    if input.dtype is not torch.float32 or not input.is_contiguous() or input.shape[-1] % 2:
        raise ArgumentError(
            f"silu_and_mul: needs contiguous float32 rows of even length, got {input.dtype}, "
            f"{tuple(input.shape)}, strides {input.stride()}"
        )
    if out is None:
        out = torch.empty((*input.shape[:-1], features))
    else:
        check_tensor("silu_and_mul", "out", out, input, (*input.shape[:-1], features))
        check_disjoint("silu_and_mul", "out", out, "input", input)
        if not out.is_contiguous():
            raise ArgumentError(f"silu_and_mul: out must be contiguous, strides are {out.stride()}")
    rows = out.numel() // features if features else 0
    _silu_and_mul(input.data_ptr(), rows, features, out.data_ptr(), torch.get_num_threads())
    return out
