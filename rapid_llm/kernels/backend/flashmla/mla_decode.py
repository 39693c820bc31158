"""`attention.mla_decode` by FlashMLA. Its schedule depends on the lengths, which are on the device and change from call
to call, so that each call makes its own, on the device too: nothing waits, and a captured call stays right."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.backend.flashmla import LIBRARY
from rapid_llm.kernels.ops.attention.attention_mla_decode import allocate, check
from rapid_llm.kernels.registry import ArgumentError

_OP: Final = "attention.mla_decode"
_PAGE: Final = 64
_metadata: Final = LIBRARY.function("metadata")
_decode: Final = LIBRARY.function("decode")


def attention_mla_decode(
    query: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    value_dim: int = 512,
    out: Tensor | None = None,
) -> Tensor:
    """Reads the cache as it lies. A length of 0 gives zeros."""
    check(query, kv_cache, seq_lens, block_table, value_dim)
    if kv_cache.shape[1] != _PAGE or value_dim != 512 or query.shape[2] not in (512, 576):
        raise ArgumentError(
            f"{_OP}: flashmla takes pages of {_PAGE} rows of 576 or 512 values, and value_dim 512: got kv_cache "
            f"{tuple(kv_cache.shape)}, value_dim {value_dim}"
        )
    result = allocate(query, value_dim, out)
    if not query.shape[0] or not query.shape[1]:
        return result
    lengths, table = seq_lens.to(torch.int32), block_table.to(torch.int32)
    schedule, splits = _metadata(lengths, query.shape[1], 1)
    answer, _ = _decode(
        query.unsqueeze(1), kv_cache, table, lengths, value_dim, schedule,
        num_splits=splits, softmax_scale=float(scale), causal=False,
    )  # fmt: skip
    return result.copy_(answer.squeeze(1)).masked_fill_((lengths <= 0)[:, None, None], 0.0)
