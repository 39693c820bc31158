"""`jit/rope`: one call of a CUDA launcher, in place; see csrc/rope/rope.cu."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from rapid_llm.kernels.jit import Kernel

_rope: Final = Kernel("rope", "rope/rope.cu")
prepare: Final = _rope.prepare


def rope(query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, interleaved: bool = False) -> None:
    """Rotate query and key, CUDA tensors with a contiguous last dimension as the table's, in place. See the op."""
    _rope[query.get_device()](query, key, positions, cos_sin_cache, interleaved)
