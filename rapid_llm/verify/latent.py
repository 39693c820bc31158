"""attention.mla_decode in float64: its oracle, its bound, and the work of a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapid_llm.verify.bounds_paged import attend as attend_error
from rapid_llm.verify.bounds_paged import rounded as probs_unit
from rapid_llm.verify.oracles import _reference, gather_keys
from rapid_llm.verify.rounding import finish
from rapid_llm.verify.work import Work, unique_bytes


@_reference
def attention_mla_decode(
    *, query: Tensor, kv_cache: Tensor, seq_lens: Tensor, block_table: Tensor, scale: float, value_dim: int = 512
) -> Tensor:
    """One token per sequence; a latent row is the key of every head, its first value_dim elements the value."""
    result = torch.zeros(*query.shape[:2], value_dim, dtype=torch.float64, device=query.device)
    for i, length in enumerate(seq_lens.tolist()):
        if length > 0:
            rows = gather_keys(kv_cache, block_table[i], length)[:, 0].to(torch.float64)
            weights = torch.softmax(query[i].to(torch.float64) @ rows.T * scale, dim=-1)
            result[i] = weights @ rows[:, :value_dim]
    return result


def attention_mla_decode_bound(
    args: dict[str, Any], expected: Tensor, roundings: tuple[str, ...] = ()
) -> tuple[Tensor, ...]:
    """As attention.decode with one head of keys and values, see `bounds_paged.attend`."""
    slack = torch.zeros_like(expected)
    value_dim = expected.shape[2]
    for i, length in enumerate(args["seq_lens"].tolist()):
        if length > 0:
            rows = gather_keys(args["kv_cache"], args["block_table"][i], length)
            error = attend_error(
                args["query"][i : i + 1], rows, rows[..., :value_dim], length, args["scale"], probs_unit(roundings)
            )
            slack[i : i + 1] = error
    return (finish(expected, slack, args["query"].dtype, roundings),)


def attention_mla_decode_work(
    *, query: Tensor, kv_cache: Tensor, seq_lens: Tensor, block_table: Tensor, scale: float, value_dim: int = 512
) -> Work:
    """Each latent row that is seen, once; 2 (head_dim + value_dim) + 4 operations for each of them and head."""
    del scale
    seen, page = seq_lens.tolist(), kv_cache.shape[1]
    rows = sum(seen) * kv_cache.shape[3] * kv_cache.element_size()
    table = sum(-(-n // page) for n in seen) * block_table.element_size()
    heads, dim = query.shape[1:]
    return Work(
        unique_bytes(query) + rows + unique_bytes(seq_lens) + table,
        query.shape[0] * heads * value_dim * query.element_size(),
        sum(seen) * heads * (2 * (dim + value_dim) + 4),
    )
