"""`jit/rmsnorm_linear_silu_and_mul.settled`: one row of input, one call of a CUDA launcher.

See csrc/gemm/fused_rmsnorm_linear_silu_and_mul.cu.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.jit import Kernel

_gated: Final = Kernel("rmsnorm_linear_silu_and_mul", "gemm/fused_rmsnorm_linear_silu_and_mul.cu")
prepare: Final = _gated.prepare


def rmsnorm_linear_silu_and_mul(
    input: Tensor, norm_weight: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None
) -> Tensor:
    """silu(gate) * up of rmsnorm(input) @ weight.T for a weight from `linear_jit.settle`, read while the kernel before
    runs."""
    if out is None:
        out = torch.empty((*input.shape[:-1], weight.shape[0] // 2), dtype=input.dtype, device=input.device)
    _gated[input.get_device()](out, input, norm_weight, weight, eps)
    return out
