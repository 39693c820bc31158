"""`cpp/silu_and_mul`: one C++ call for dense fp32 rows; see csrc/activation/silu_and_mul.cpp."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import load_cpp
from rapid_llm.kernels.registry import ArgumentError

_library: Final = load_cpp("silu_and_mul", "activation/silu_and_mul.cpp")


def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """silu_and_mul of contiguous fp32 rows; see the op."""
    if out is None:
        shape = input.shape
        if not shape:
            raise ArgumentError("silu_and_mul: input must have a last dimension, got a scalar")
        out = input.new_empty(*shape[:-1], shape[-1] // 2)
    _library.silu_and_mul(out, input, torch.get_num_threads())
    return out
