"""`jit/rmsnorm_linear.settled`: one row of input, one call of a CUDA launcher: csrc/gemm/fused_rmsnorm_linear.cu."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.jit import Kernel

_rmsnorm_linear: Final = Kernel("rmsnorm_linear", "gemm/fused_rmsnorm_linear.cu")
prepare: Final = _rmsnorm_linear.prepare


def rmsnorm_linear(
    input: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
) -> Tensor:
    """rmsnorm(input) @ weight.T + bias for a weight from `linear_jit.settle`, read while the kernel before runs."""
    if out is None:
        out = torch.empty((*input.shape[:-1], weight.shape[0]), dtype=input.dtype, device=input.device)
    _rmsnorm_linear[input.get_device()](out, input, norm_weight, weight, bias, eps)
    return out
