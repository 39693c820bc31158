"""`aot/linear`: one call of the extension's launcher for up to 8 rows of input.

Built from csrc/gemm/linear.cu at the repository's root. Eager calls take the module's
function, which costs less on the host; under torch.compile it is the torch op.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.compiler import is_compiling

from rapid_llm.kernels import aot

_thin: Final = aot.load().linear
_op: Final = torch.ops.rapid_llm.linear.default


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """input @ weight.T + bias for CUDA tensors whose last dimension is contiguous. See the op."""
    return _run(input, weight, bias, out, False)


def linear_settled(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """The same for a weight from `linear_jit.settle`, read while the kernel before still runs."""
    return _run(input, weight, bias, out, True)


def _run(input: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, settled: bool) -> Tensor:
    if out is None:
        out = torch.empty((*input.shape[:-1], weight.shape[0]), dtype=input.dtype, device=input.device)
    (_op if is_compiling() else _thin)(out, input, weight, bias, settled)
    return out
