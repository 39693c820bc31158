"""`jit/silu_and_mul`: one call of a CUDA launcher for rows dense in themselves; see csrc/activation/silu_and_mul.cu."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.jit import Kernel

_silu_and_mul: Final = Kernel("silu_and_mul", "activation/silu_and_mul.cu")
prepare: Final = _silu_and_mul.prepare


def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """silu_and_mul of CUDA tensors with a contiguous last dimension. See the op."""
    if out is None:
        shape = input.shape
        out = torch.empty((*shape[:-1], shape[-1] // 2), dtype=input.dtype, device=input.device)
    _silu_and_mul[input.get_device()](out, input)
    return out
