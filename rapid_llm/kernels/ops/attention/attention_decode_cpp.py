"""`cpp/attention.decode`: a paged fp32 cache read in place, all sequences and heads in one C++ call.

See csrc/attention/attention_decode.cpp.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import function, load_cpp
from rapid_llm.kernels.ops.arguments import check_disjoint, check_host, check_tensor
from rapid_llm.kernels.ops.attention._paged import check_attention
from rapid_llm.kernels.registry import ArgumentError

_library: Final = load_cpp("attention_decode", "attention/attention_decode.cpp")
_decode: Final = function(_library, "attention_decode", "pnnnnnnpnnnpnnnnnppnnfpi", ctypes.c_int64)
_OP: Final = "attention.decode"


def attention_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """attention.decode of fp32 tensors that are dense in their last dimension; see the op."""
    check_attention(_OP, query, k_cache, v_cache, seq_lens, block_table)
    check_host(_OP, query, k_cache, v_cache, seq_lens, block_table)
    sequences, heads, dim = query.shape
    pages, page_size, kv_heads, _ = k_cache.shape
    if query.dtype is not torch.float32 or seq_lens.shape[0] != sequences:
        raise ArgumentError(f"{_OP}: needs float32 and one length a query, got {query.dtype}, {seq_lens.shape[0]}")
    q_sequence, q_head, q_last = query.stride()
    k_page, k_row, k_head, k_last = k_cache.stride()
    v_page, v_row, v_head, v_last = v_cache.stride()
    if dim > 1 and not q_last == k_last == v_last == 1:
        raise ArgumentError(f"{_OP}: query and caches must be contiguous in their last dimension")
    result = torch.empty((sequences, heads, dim)) if out is None or not out.is_contiguous() else out
    if out is not None:
        check_tensor(_OP, "out", out, query, query.shape)
        check_disjoint(_OP, "out", out, "query", query)
    lengths, table = _as_int32(seq_lens), _as_int32(block_table)
    wrong = _decode(
        *(query.data_ptr(), q_sequence, q_head, sequences, heads, kv_heads, dim),
        *(k_cache.data_ptr(), k_page, k_row, k_head, v_cache.data_ptr(), v_page, v_row, v_head, pages, page_size),
        *(lengths.data_ptr(), table.data_ptr(), table.stride(0), table.shape[1], scale, result.data_ptr()),
        torch.get_num_threads(),
    )
    if wrong >= 0:
        raise ArgumentError(
            f"{_OP}: sequence {wrong} has {int(seq_lens[wrong])} keys in pages of {page_size}; its block table "
            f"{block_table[wrong].tolist()} is too short for them or names a page outside the cache's {pages}"
        )
    return result if out is None or out is result else out.copy_(result)


def _as_int32(indices: Tensor) -> Tensor:
    """Dense int32, without a call where they are that already."""
    if indices.dtype is torch.int32 and indices.is_contiguous():
        return indices
    if indices.numel() and int(indices.abs().max()) >= 2**31:
        raise ArgumentError(f"{_OP}: a length or page of {int(indices.abs().max())} does not fit int32")
    return indices.to(torch.int32).contiguous()
