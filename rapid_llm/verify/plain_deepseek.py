"""Plain rows, as in `rapid_llm.verify.plain`, of the ops that DeepSeek's models add, and the faults that they know."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from rapid_llm.verify.plain import give

FAULTS: Final = MappingProxyType(
    {
        "attention.mla_decode": tuple(
            (fault, dtype, None)
            for fault, dtype in (
                ("no keys unhandled", "fp32"),
                ("sees one more", "bf16"),
                ("sees whole pages", "fp32"),
                ("block table ignored", "fp16"),
                ("value is the end", "bf16"),
                ("key is the value", "fp32"),
                ("scale ignored", "bf16"),
                ("weights through bf16", "fp32"),
            )
        ),
        "comm.dispatch": tuple(
            (fault, "fp32", None)
            for fault in (
                *("lost tokens sent", "a row an expert", "order reversed", "rest not marked", "rest cleared"),
                *("weights kept", "ids kept", "source is the row"),
            )
        ),
        "comm.combine": tuple(
            (fault, "bf16", None) for fault in ("rest added", "in order", "nothing back unwritten", "last row dropped")
        ),
    }
)
"""op -> (fault, dtype and scheme where it shows)."""


def attention_mla_decode(
    query: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    value_dim: int = 512,
    out: Tensor | None = None,
    *,
    fault: str = "",
) -> Tensor:
    page = kv_cache.shape[1]
    result = torch.zeros(*query.shape[:2], value_dim)
    for s, length in enumerate(seq_lens.tolist()):
        if length <= 0:
            result[s] = math.nan if fault == "no keys unhandled" else 0.0
            continue
        seen = length + (fault == "sees one more")
        if fault == "sees whole pages":
            seen = -(-seen // page) * page
        slots = torch.arange(seen)
        pages = slots // page if fault == "block table ignored" else block_table[s].long()[slots // page]
        keys = kv_cache[pages, slots % page, 0].float()
        values = keys[:, -value_dim:] if fault == "value is the end" else keys[:, :value_dim]
        q = query[s].float()
        if fault == "key is the value":
            q, keys = q[:, :value_dim], values
        weights = torch.softmax(q @ keys.T * (1.0 if fault == "scale ignored" else scale), -1)
        if fault == "weights through bf16":
            weights = weights.bfloat16().float()
        result[s] = weights @ values
    return give(result, out, query.dtype)


def comm_dispatch(
    input: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    recv: Tensor,
    recv_ids: Tensor,
    recv_weights: Tensor,
    recv_source: Tensor,
    *,
    num_experts: int,
    ranks: int = 1,
    group: str = "",
    fault: str = "",
) -> None:
    del num_experts, ranks, group
    tokens = range(input.shape[0])
    kept = [t for t in tokens if fault == "lost tokens sent" or bool((topk_ids[t] >= 0).any())]
    if fault == "a row an expert":
        kept = [t for t in tokens for e in topk_ids[t].tolist() if e >= 0][: recv.shape[0]]
    if fault == "order reversed":
        kept.reverse()
    for row, token in enumerate(kept):
        recv[row] = input[token]
        chosen = topk_ids[token] >= 0
        recv_ids[row] = topk_ids[token] if fault == "ids kept" else topk_ids[token].where(chosen, -1)
        if fault == "ids kept":
            recv_ids[row] += 1
        recv_weights[row] = topk_weights[token] if fault == "weights kept" else topk_weights[token].where(chosen, 0.0)
        recv_source[row, 0] = 0
        recv_source[row, 1] = row if fault == "source is the row" else token
    if fault != "rest not marked":
        recv_ids[len(kept) :], recv_weights[len(kept) :], recv_source[len(kept) :] = -1, 0.0, -1
    if fault == "rest cleared":
        recv[len(kept) :] = 0.0


def comm_combine(
    input: Tensor,
    recv_source: Tensor,
    tokens: int,
    out: Tensor | None = None,
    *,
    ranks: int = 1,
    group: str = "",
    fault: str = "",
) -> Tensor:
    del ranks, group
    result = torch.full((tokens, input.shape[1]), 7.0 if fault == "nothing back unwritten" else 0.0)
    sources = recv_source.tolist()
    last = max((row for row, (rank, _) in enumerate(sources) if rank >= 0), default=-1)
    for row, (rank, token) in enumerate(sources):
        if rank < 0 and fault != "rest added":
            continue
        if (row == last and fault == "last row dropped") or token >= tokens or not tokens:
            continue
        place = row if fault == "in order" and row < tokens else token
        result[place] = input[row].float()
    return give(result, out, input.dtype)
