"""`aot/scale`: one call of the extension's launcher for dense tensors.

Built from csrc/elementwise/scale.cu at the repository's root. Eager calls take the module's
function, which costs less on the host; under torch.compile it is the torch op.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.compiler import is_compiling

from rapid_llm.kernels import aot

_thin: Final = aot.load().scale
_op: Final = torch.ops.rapid_llm.scale.default


def scale(input: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    """input * factor for contiguous CUDA tensors; `out` may be `input`. See the op."""
    if out is None:
        out = torch.empty_like(input)
    (_op if is_compiling() else _thin)(out, input, factor)
    return out
