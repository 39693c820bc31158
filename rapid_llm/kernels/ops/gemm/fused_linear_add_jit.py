"""`jit/linear_add.settled`: one row of input, one call of a CUDA launcher: csrc/gemm/fused_linear_add.cu."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from rapid_llm.kernels.jit import Kernel

_linear_add: Final = Kernel("linear_add", "gemm/fused_linear_add.cu")
prepare: Final = _linear_add.prepare


def linear_add(input: Tensor, weight: Tensor, residual: Tensor) -> None:
    """residual += input @ weight.T for a weight from `linear_jit.settle`, read while the kernel before runs."""
    _linear_add[input.get_device()](residual, input, weight)
