"""`jit/scale`: one call of a CUDA launcher for dense tensors; see csrc/elementwise/scale.cu."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.jit import Kernel

_scale: Final = Kernel("scale", "elementwise/scale.cu")
prepare: Final = _scale.prepare


def scale(input: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    """input * factor for contiguous CUDA tensors; `out` may be `input`. See the op."""
    if out is None:
        out = torch.empty_like(input)
    _scale[input.get_device()](out, input, factor)
    return out
