"""What one forward pass tells the attention and cache ops about its batch: always an argument, never module state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

KVCache = Sequence[tuple[Tensor, Tensor]]
"""Per layer (k_cache, v_cache), each (pages, page_size, kv_heads, head_dim). Page 0 is never a request's: padding may
write there."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One varlen layout for prefill, resumed chunks and decode; tokens of all sequences lie back to back.

    positions: (tokens,) int64, each token's index in its sequence. slot_mapping: (tokens,) int64 cache slots, negative
    for padding. cu_seqlens_q: (sequences + 1,) int32 offsets of each sequence's tokens. seq_lens: (sequences,) int32,
    keys of each sequence once this pass has written its own. block_table: (sequences, max_pages) int32. decode: every
    sequence has exactly one token, so attention.decode applies.
    """

    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_table: Tensor
    decode: bool
