"""`jit/rmsnorm`: one call of a CUDA launcher for rows that are dense in themselves; see csrc/layernorm/rmsnorm.cu."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.jit import Kernel

_rmsnorm: Final = Kernel("rmsnorm", "layernorm/rmsnorm.cu")
prepare: Final = _rmsnorm.prepare


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    """rmsnorm of CUDA tensors with a contiguous last dimension; `out` may be `input`. See the op."""
    if out is None:
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
    _rmsnorm[input.get_device()](out, input, weight, eps)
    return out
