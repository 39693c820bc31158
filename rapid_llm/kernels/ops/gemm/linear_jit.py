"""`jit/linear*`: up to 8 rows of input times a dense weight, one call of a CUDA launcher: csrc/gemm/linear_gemv.cu.

A row of the result has the same bits whether the input has two rows or eight; one row alone takes a faster kernel.
`linear_settled` reads the first weights while the previous kernel still runs, which is right only for a weight that no
kernel is writing: `settle` sees to that.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.jit import Kernel

_linear: Final = Kernel("linear", "gemm/linear_gemv.cu")
prepare: Final = _linear.prepare


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """input @ weight.T + bias for CUDA tensors whose last dimension is contiguous. See the op."""
    if out is None:
        out = torch.empty((*input.shape[:-1], weight.shape[0]), dtype=input.dtype, device=input.device)
    _linear[input.get_device()](out, input, weight, bias, False)
    return out


def settle(weight: Tensor, scheme: str) -> Tensor:
    """The weight itself, once nothing is writing it any more; it must not be written while a call may read it."""
    if weight.is_cuda:
        torch.cuda.synchronize(weight.device)
    return weight


def linear_settled(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """The same for a weight from `settle`."""
    if out is None:
        out = torch.empty((*input.shape[:-1], weight.shape[0]), dtype=input.dtype, device=input.device)
    _linear[input.get_device()](out, input, weight, bias, True)
    return out
