"""`cpp/rope_kvcache_write`: rotation and cache write in one C++ call; see csrc/kvcache/rope_kvcache_write.cpp."""

from __future__ import annotations

import ctypes
import struct
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import function, load_cpp
from rapid_llm.kernels.ops.arguments import check_host
from rapid_llm.kernels.ops.kvcache.rope_kvcache_write import OP, check_fit
from rapid_llm.kernels.registry import ArgumentError

_library: Final = load_cpp("rope_kvcache_write", "kvcache/rope_kvcache_write.cpp")
_call: Final = function(_library, "rope_kvcache_write", "p", ctypes.c_int64)
_fault: Final = function(_library, "rope_kvcache_write_fault", "", ctypes.c_char_p)

_pack: Final = struct.Struct("=35q").pack
"""One block of integers: to convert 35 arguments one by one would take ctypes longer than the call takes."""


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
    check_fit(query, key, value, k_cache, v_cache, positions, cos_sin_cache, slot_mapping)
    check_host(OP, query, key, value, k_cache, v_cache, positions, cos_sin_cache, slot_mapping)
    tokens, query_heads, dim = query.shape
    pages, page_size, heads, _ = k_cache.shape
    q_strides, k_strides, v_strides = query.stride(), key.stride(), value.stride()
    kc_strides, vc_strides = k_cache.stride(), v_cache.stride()
    dense = q_strides[2] == k_strides[2] == v_strides[2] == kc_strides[3] == vc_strides[3] == 1 or dim < 2
    if not dense or not cos_sin_cache.is_contiguous() or query.dtype is not torch.float32:
        raise ArgumentError(
            f"{OP}: heads and caches must be float32, dense in their last dimension, and cos_sin_cache contiguous: got "
            f"{query.dtype}, strides {q_strides}, {k_strides}, {v_strides}, {kc_strides}, {vc_strides}, "
            f"{cos_sin_cache.stride()}"
        )
    at = positions if positions.dtype is torch.int64 and positions.is_contiguous() else positions.long().contiguous()
    slots = slot_mapping if slot_mapping.is_contiguous() else slot_mapping.contiguous()
    rows, rotary = cos_sin_cache.shape
    wrong = _call(
        _pack(
            *(query.data_ptr(), key.data_ptr(), value.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()),
            *(at.data_ptr(), cos_sin_cache.data_ptr(), slots.data_ptr(), tokens, query_heads, heads, dim),
            *(pages, page_size, rows, rotary, interleaved, torch.get_num_threads()),
            *(*q_strides, *k_strides, *v_strides, *kc_strides, *vc_strides),
        )
    )
    if wrong:
        _raise(wrong, at, slots, rows, (pages, page_size))


def _raise(wrong: int, positions: Tensor, slots: Tensor, rows: int, cache: tuple[int, int]) -> None:
    if wrong == 1:
        raise ArgumentError(_fault().decode())
    token, of_slot = divmod(wrong - 2, 2)
    if of_slot:
        raise IndexError(f"{OP}: slot {int(slots[token])} of token {token} is beyond {cache[0]} pages of {cache[1]}")
    raise IndexError(f"{OP}: position {int(positions[token])} of token {token} is not in [0, {rows})")
