"""`jit/fused_add_rmsnorm`: one call of a CUDA launcher, in place; see csrc/layernorm/fused_add_rmsnorm.cu."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from rapid_llm.kernels.jit import Kernel

_fused_add_rmsnorm: Final = Kernel("fused_add_rmsnorm", "layernorm/fused_add_rmsnorm.cu")
prepare: Final = _fused_add_rmsnorm.prepare


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """fused_add_rmsnorm of CUDA tensors with a contiguous last dimension, in place. See the op."""
    _fused_add_rmsnorm[input.get_device()](input, residual, weight, eps)
