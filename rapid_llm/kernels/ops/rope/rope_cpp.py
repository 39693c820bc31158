"""`cpp/rope`: query and key of all heads in one C++ call; see csrc/rope/rope.cpp."""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import function, load_cpp
from rapid_llm.kernels.ops.arguments import check_disjoint, check_host, check_written
from rapid_llm.kernels.registry import ArgumentError

_rope: Final = function(load_cpp("rope", "rope/rope.cpp"), "rope", "pnnnpnnnpnpnnii", ctypes.c_int64)

_POSITIONS: Final = (torch.int64, torch.int32)


def rope(query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, interleaved: bool = False) -> None:
    """Rotate fp32 heads in place; the last dimension of query, key and table is dense. See the op."""
    check_host("rope", query, key, positions, cos_sin_cache)
    if (query.dim(), key.dim(), cos_sin_cache.dim()) != (3, 3, 2) or positions.dtype not in _POSITIONS:
        raise ArgumentError(
            f"rope: needs query and key (tokens, heads, head_dim), a table (positions, rotary_dim) and int32 or int64 "
            f"positions: got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(cos_sin_cache.shape)}, {positions.dtype}"
        )
    rows, rotary = cos_sin_cache.shape
    tokens, query_heads, dim = query.shape
    key_tokens, key_heads, key_dim = key.shape
    if (
        (key_tokens, key_dim, tuple(positions.shape)) != (tokens, dim, (tokens,))
        or not query.dtype == key.dtype == cos_sin_cache.dtype == torch.float32
        or rotary % 2
        or rotary > dim
    ):
        raise ArgumentError(
            f"rope: query {tuple(query.shape)} {query.dtype}, key {tuple(key.shape)} {key.dtype}, positions "
            f"{tuple(positions.shape)} and table {tuple(cos_sin_cache.shape)} {cos_sin_cache.dtype} do not fit: heads "
            "are float32 with the same shape but for their number, one position a token, an even rotary_dim <= head_dim"
        )
    q_token, q_head, q_last = query.stride()
    k_token, k_head, k_last = key.stride()
    if (q_last != 1 and dim > 1) or (k_last != 1 and dim > 1) or not cos_sin_cache.is_contiguous():
        raise ArgumentError("rope: query, key and table must be contiguous in their last dimension")
    check_written("rope", "query", query)
    check_written("rope", "key", key)
    check_disjoint("rope", "query", query, "key", key)
    dense = positions.dtype is torch.int64 and positions.is_contiguous()
    at = positions if dense else positions.to(torch.int64).contiguous()
    wrong = _rope(
        *(query.data_ptr(), q_token, q_head, query_heads, key.data_ptr(), k_token, k_head, key_heads),
        *(at.data_ptr(), tokens, cos_sin_cache.data_ptr(), rows, rotary),
        *(int(interleaved), torch.get_num_threads()),
    )
    if wrong >= 0:
        raise IndexError(f"rope: position {int(positions[wrong])} of token {wrong} is not in [0, {rows})")
