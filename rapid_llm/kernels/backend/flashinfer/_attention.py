"""What flashinfer's decode and prefill adapters share: argument checks and the launch around a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapid_llm.kernels.backend.flashinfer._calls import check_rows, deliver, direct, on_device
from rapid_llm.kernels.backend.flashinfer._plans import Batch
from rapid_llm.kernels.ops.arguments import check_disjoint, check_kind, check_tensor, check_written
from rapid_llm.kernels.ops.attention._paged import check_attention
from rapid_llm.kernels.registry import ArgumentError

LAYOUT = "NHD"
"""flashinfer's name for pages of (page_size, kv_heads, head_dim), which is this package's layout."""

_REACH = 2**31
"""Offsets into query and out are 32-bit numbers in flashinfer."""


def check(
    op: str,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    out: Tensor | None,
) -> None:
    """Raise `ArgumentError` for what flashinfer would misread."""
    check_attention(op, query, k_cache, v_cache, seq_lens, block_table)
    check_kind(op, "k_cache", k_cache, query)
    for name, tensor in (("query", query), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_rows(op, name, tensor)
    if k_cache.stride() != v_cache.stride():
        raise ArgumentError(
            f"{op}: flashinfer needs k_cache and v_cache with the same strides: "
            f"got {k_cache.stride()} and {v_cache.stride()}"
        )
    if query.numel() >= _REACH:
        raise ArgumentError(f"{op}: flashinfer takes fewer than 2**31 elements of query, got {query.numel()}")
    if out is not None:
        check_tensor(op, "out", out, query, query.shape)
        check_written(op, "out", out)
        check_disjoint(op, "out", out, "query", query)


def operands(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Query and a scale above 0: flashinfer takes maxima before it multiplies, and its mask is a number."""
    if not scale > 0:
        query, scale = (query * -1.0, -scale) if scale < 0 else (query * scale, 1.0)
    if query.numel() and (query.shape[0] - 1) * query.stride(0) >= _REACH - query[0].numel():
        query = query.contiguous()
    return query, scale


def launch(
    wrapper: Any, batch: Batch, query: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor | None
) -> torch.Tensor:
    """Run the wrapper's plan; queries that see no key give zeros. The caller holds the slot's lock."""
    result = direct(out, query, k_cache, v_cache)
    if result is None:
        result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if batch.keys:
        with on_device(query):
            wrapper.run(query[: batch.queries], (k_cache, v_cache), out=result[: batch.queries])
    if batch.blind is not None:
        result.index_fill_(0, batch.blind, 0.0)
    return deliver(result, out)
