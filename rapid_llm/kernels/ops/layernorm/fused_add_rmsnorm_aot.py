"""`aot/fused_add_rmsnorm`: one call of the extension's launcher, in place.

Built from csrc/layernorm/fused_add_rmsnorm.cu at the repository's root. Eager calls take the module's
function, which costs less on the host; under torch.compile it is the torch op.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.compiler import is_compiling

from rapid_llm.kernels import aot

_thin: Final = aot.load().fused_add_rmsnorm
_op: Final = torch.ops.rapid_llm.fused_add_rmsnorm.default


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """fused_add_rmsnorm of CUDA tensors with a contiguous last dimension, in place. See the op."""
    (_op if is_compiling() else _thin)(input, residual, weight, eps)
