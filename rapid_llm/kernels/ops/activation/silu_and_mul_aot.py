"""`aot/silu_and_mul`: one call of the extension's launcher for rows dense in themselves.

Built from csrc/activation/silu_and_mul.cu at the repository's root. Eager calls take the module's
function, which costs less on the host; under torch.compile it is the torch op.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.compiler import is_compiling

from rapid_llm.kernels import aot

_thin: Final = aot.load().silu_and_mul
_op: Final = torch.ops.rapid_llm.silu_and_mul.default


def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """silu_and_mul of CUDA tensors with a contiguous last dimension. See the op."""
    if out is None:
        shape = input.shape
        out = torch.empty((*shape[:-1], shape[-1] // 2), dtype=input.dtype, device=input.device)
    (_op if is_compiling() else _thin)(out, input)
    return out
