"""`cpp/kvcache.write`: key and value of all tokens in one C++ call, any dtype; see csrc/kvcache/kvcache_write.cpp."""

from __future__ import annotations

import ctypes
from typing import Final

from torch import Tensor

from rapid_llm.kernels.cpp import function, load_cpp
from rapid_llm.kernels.ops.arguments import check_disjoint, check_host, check_written
from rapid_llm.kernels.ops.kvcache.kvcache_write import check_fit
from rapid_llm.kernels.registry import ArgumentError

_library: Final = load_cpp("kvcache_write", "kvcache/kvcache_write.cpp")
_write: Final = function(_library, "kvcache_write", "pnnpnnppnnnnnnnnnnpn", ctypes.c_int64)


def kvcache_write(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """kvcache.write of tensors that are dense in their last dimension; see the op."""
    check_fit(key, value, k_cache, v_cache, slot_mapping)
    check_host("kvcache.write", key, value, k_cache, v_cache, slot_mapping)
    if k_cache.data_ptr() == v_cache.data_ptr():
        check_disjoint("kvcache.write", "k_cache", k_cache, "v_cache", v_cache)
    check_written("kvcache.write", "k_cache", k_cache)
    check_written("kvcache.write", "v_cache", v_cache)
    tokens, heads, dim = key.shape
    pages, page_size = k_cache.shape[:2]
    size = key.element_size()
    key_token, key_head, key_last = key.stride()
    value_token, value_head, value_last = value.stride()
    k_page, k_row, k_head, k_last = k_cache.stride()
    v_page, v_row, v_head, v_last = v_cache.stride()
    if dim > 1 and not key_last == value_last == k_last == v_last == 1:
        raise ArgumentError("kvcache.write: key, value and caches must be contiguous in their last dimension")
    slots = slot_mapping if slot_mapping.is_contiguous() else slot_mapping.contiguous()
    wrong = _write(
        *(key.data_ptr(), key_token * size, key_head * size, value.data_ptr(), value_token * size, value_head * size),
        *(k_cache.data_ptr(), v_cache.data_ptr(), k_page * size, k_row * size, k_head * size),
        *(v_page * size, v_row * size, v_head * size, pages, page_size, heads, dim * size, slots.data_ptr(), tokens),
    )
    if wrong >= 0:
        raise IndexError(
            f"kvcache.write: slot {int(slots[wrong])} of token {wrong} is beyond {pages} pages of {page_size}"
        )
