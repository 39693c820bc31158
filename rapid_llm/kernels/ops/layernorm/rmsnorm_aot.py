"""`aot/rmsnorm`: one call of the extension's launcher for rows dense in themselves.

Built from csrc/layernorm/rmsnorm.cu at the repository's root. Eager calls take the module's
function, which costs less on the host; under torch.compile it is the torch op.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.compiler import is_compiling

from rapid_llm.kernels import aot

_thin: Final = aot.load().rmsnorm
_op: Final = torch.ops.rapid_llm.rmsnorm.default


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    """rmsnorm of CUDA tensors with a contiguous last dimension; `out` may be `input`. See the op."""
    if out is None:
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
    (_op if is_compiling() else _thin)(out, input, weight, eps)
    return out
