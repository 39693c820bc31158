"""Native `attention.mla_decode`: PyTorch on every device, one sequence after the other.

A sequence is read through the whole width of its block table and masked by its length where that is, on the device:
nothing waits for it, so that a captured call stays right as sequences grow.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.arguments import check_disjoint, check_kind, check_tensor, check_written
from rapid_llm.kernels.ops.gemm.precision import rounds_fp32
from rapid_llm.kernels.registry import ArgumentError

_OP: Final = "attention.mla_decode"
_INTEGERS: Final = (torch.int32, torch.int64)


def attention_mla_decode(
    query: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    value_dim: int = 512,
    out: Tensor | None = None,
) -> Tensor:
    """One query token per sequence over its latent cache. See `rapid_llm.kernels.attention_mla_decode`."""
    check(query, kv_cache, seq_lens, block_table, value_dim)
    if not query.is_cuda:
        _check_pages(kv_cache, seq_lens, block_table)
    result = allocate(query, value_dim, out)
    if kv_cache.shape[0] == 0 or block_table.shape[1] == 0:
        return result.zero_()
    position = torch.arange(block_table.shape[1] * kv_cache.shape[1], device=query.device)
    wide = torch.float64 if rounds_fp32(query.new_empty(0, dtype=torch.float32)) else torch.float32
    for sequence in range(query.shape[0]):
        seen = position < seq_lens[sequence]
        keys = _rows(kv_cache, block_table[sequence], seen).to(wide)
        scores = (query[sequence].to(wide) @ keys.t()).mul_(float(scale)).masked_fill_(~seen, float("-inf"))
        # Where nothing is seen every score is -inf and the softmax NaN: such a row gives zeros.
        weights = torch.softmax(scores, 1).masked_fill_(~seen, 0.0)
        result[sequence] = weights @ keys[:, :value_dim]
    return result


def check(query: Tensor, kv_cache: Tensor, seq_lens: Tensor, block_table: Tensor, value_dim: int) -> None:
    """Raise `ArgumentError` for shapes, dtypes or devices that would make the result silently wrong."""
    check_kind(_OP, "kv_cache", kv_cache, query)
    if query.dim() != 3 or kv_cache.dim() != 4 or kv_cache.shape[1] == 0 or kv_cache.shape[2] != 1:
        raise ArgumentError(
            f"{_OP}: query must be (sequences, heads, head_dim) and kv_cache (pages, page_size, 1, head_dim) with a "
            f"page_size of at least 1, got {tuple(query.shape)} and {tuple(kv_cache.shape)}"
        )
    if kv_cache.shape[3] != query.shape[2] or not 1 <= value_dim <= query.shape[2]:
        raise ArgumentError(
            f"{_OP}: head_dim {query.shape[2]} of query must be that of kv_cache, {kv_cache.shape[3]}, and value_dim "
            f"between 1 and it: got {value_dim}"
        )
    if seq_lens.shape != query.shape[:1] or block_table.dim() != 2 or block_table.shape[0] != query.shape[0]:
        raise ArgumentError(
            f"{_OP}: seq_lens must be (sequences,) and block_table (sequences, max_pages) for {query.shape[0]} "
            f"sequences, got {tuple(seq_lens.shape)} and {tuple(block_table.shape)}"
        )
    for name, tensor in (("seq_lens", seq_lens), ("block_table", block_table)):
        if tensor.dtype not in _INTEGERS or tensor.device != query.device:
            where = "CUDA device" if query.is_cuda else "device"
            raise ArgumentError(
                f"{_OP}: {name} must be int32 on the same {where}, {query.device}: got {tensor.dtype} on "
                f"{tensor.device}"
            )


def allocate(query: Tensor, value_dim: int, out: Tensor | None) -> Tensor:
    """The result tensor: `out` once checked, else new and contiguous."""
    shape = (*query.shape[:2], value_dim)
    if out is None:
        return torch.empty(shape, dtype=query.dtype, device=query.device)
    check_tensor(_OP, "out", out, query, shape)
    check_written(_OP, "out", out)
    check_disjoint(_OP, "out", out, "query", query)
    return out


def _rows(kv_cache: Tensor, pages: Tensor, seen: Tensor) -> Tensor:
    """(rows, head_dim) of the pages in order; those that are not seen are zeros, for 0 * NaN is NaN."""
    page_size = kv_cache.shape[1]
    used = seen.view(-1, page_size)[:, 0]
    inside = torch.where(used, pages.to(torch.int64), 0)  # entries behind the last page may be anything
    return kv_cache[:, :, 0].index_select(0, inside).flatten(0, 1).masked_fill_(~seen[:, None], 0.0)


def _check_pages(kv_cache: Tensor, seq_lens: Tensor, block_table: Tensor) -> None:
    """On the CPU a sequence longer than its block table, or a page outside the cache, is an error that says so."""
    count, page_size = kv_cache.shape[:2]
    for sequence, length in enumerate(seq_lens.tolist()):
        pages = -(-length // page_size)
        if pages > block_table.shape[1]:
            raise ArgumentError(
                f"{_OP}: sequence {sequence} has {length} keys, its block_table row {block_table.shape[1]} pages of "
                f"{page_size}"
            )
        named = block_table[sequence, : max(pages, 0)].tolist()
        if named and not 0 <= min(named) <= max(named) < count:
            raise ArgumentError(
                f"{_OP}: the block table of sequence {sequence} names pages {min(named)} to {max(named)}; the cache "
                f"has pages 0 to {count - 1}"
            )
