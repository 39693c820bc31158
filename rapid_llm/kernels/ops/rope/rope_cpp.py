"""`cpp/rope`: query and key of all heads in one C++ call; see csrc/rope/rope.cpp."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import load_cpp

_library: Final = load_cpp("rope", "rope/rope.cpp")


def rope(query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, interleaved: bool = False) -> None:
    """Rotate fp32 heads in place; the last dimension of query, key and table is dense. See the op."""
    _library.rope(query, key, positions, cos_sin_cache, interleaved, torch.get_num_threads())
