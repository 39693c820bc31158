"""`aot/rope`: one call of the extension's launcher, in place.

Built from csrc/rope/rope.cu at the repository's root. Eager calls take the module's
function, which costs less on the host; under torch.compile it is the torch op.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.compiler import is_compiling

from rapid_llm.kernels import aot

_thin: Final = aot.load().rope
_op: Final = torch.ops.rapid_llm.rope.default


def rope(query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, interleaved: bool = False) -> None:
    """Rotate query and key, CUDA tensors with a contiguous last dimension as the table's, in place. See the op."""
    (_op if is_compiling() else _thin)(query, key, positions, cos_sin_cache, interleaved)
