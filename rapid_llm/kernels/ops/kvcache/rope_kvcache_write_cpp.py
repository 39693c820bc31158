"""`cpp/rope_kvcache_write`: rotation and cache write in one C++ call; see csrc/kvcache/rope_kvcache_write.cpp."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import load_cpp

_library: Final = load_cpp("rope_kvcache_write", "kvcache/rope_kvcache_write.cpp")


def rope_kvcache_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """rope_kvcache_write of fp32 tensors that are dense in their last dimension; see the op."""
    _library.rope_kvcache_write(
        *(query, key, value, k_cache, v_cache, positions, cos_sin_cache, slot_mapping),
        *(interleaved, torch.get_num_threads()),
    )
