"""Plain rows, as in `rapid_llm.verify.plain`, of attention over a paged cache, and the faults that they know."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from rapid_llm.verify.plain import give

_LIMITS: Final = (
    *(("window ignored", "bf16"), ("window one wider", "fp32"), ("window one narrower", "fp16")),
    *(("softcap ignored", "bf16"), ("softcap before scale", "fp32"), ("softcap clamps", "fp16")),
)
"""Faults of attention that show where a query sees a window, or scores are capped."""

_FP8: Final = (("fp8 bias of 8", "bf16"), ("fp8 subnormals flushed", "fp32"))
"""Faults of reading a cache of e4m3: the exponents of another vendor's format, and numbers below 2**-6 lost."""

FAULTS: Final = MappingProxyType(
    {
        "attention.decode": tuple(
            (fault, dtype, None)
            for fault, dtype in (
                ("no keys unhandled", "fp32"),
                ("sees one more", "bf16"),
                ("sees one less", "bf16"),
                ("sees whole pages", "fp32"),
                ("block table ignored", "fp16"),
                ("heads interleaved", "bf16"),
                ("scale ignored", "bf16"),
                ("maximum not taken off", "fp32"),
                ("scores in fp16", "fp32"),
                ("weights through bf16", "fp32"),
                *_LIMITS,
                *_FP8,
            )
        ),
        "attention.prefill": tuple(
            (fault, dtype, None)
            for fault, dtype in (
                ("no keys unhandled", "fp32"),
                ("not causal", "bf16"),
                ("prefix forgotten", "bf16"),
                ("sees one less", "fp16"),
                ("heads interleaved", "fp32"),
                ("weights through bf16", "fp32"),
                *_LIMITS,
                *_FP8,
            )
        ),
    }
)
"""op -> (fault, dtype and scheme where it shows)."""

FEATURES: Final = MappingProxyType(
    {
        **{fault: (fault.split()[0], 1) for fault, _ in _LIMITS},
        **dict.fromkeys((*(fault for fault, _ in _FP8), "fp8 truncates", "fp8 overflows"), ("kv_bits", 8)),
    }
)
"""fault -> a dimension, and a value of it that calls in which the fault shows may have and others have not."""


def _attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    seen: int,
    factor: float,
    window: int,
    softcap: float,
    fault: str,
) -> Tensor:
    """One query token (heads, dim) over the last `window` (if above 0) of the first `seen` keys."""
    if seen <= 0:  # an unguarded softmax divides 0 by 0
        return torch.full(query.shape, math.nan if fault == "no keys unhandled" else 0.0)
    if fault == "sees one more":
        seen += 1
    elif fault == "sees one less":
        seen -= 1
    elif fault == "sees whole pages":
        seen = -(-seen // k_cache.shape[1]) * k_cache.shape[1]
    first = max(seen - window + {"window one wider": -1, "window one narrower": 1}.get(fault, 0), 0) if window else 0
    slots = torch.arange(0 if fault == "window ignored" else min(first, seen - 1), seen)
    pages = table.long()[slots // k_cache.shape[1]]
    if fault == "block table ignored":
        pages = slots // k_cache.shape[1]
    keys, values = (_read(c, fault)[pages, slots % k_cache.shape[1]] for c in (k_cache, v_cache))
    heads, groups = query.shape[0], keys.shape[1]
    owner = torch.arange(heads) % groups if fault == "heads interleaved" else torch.arange(heads) // (heads // groups)
    scores = torch.einsum("hd,nhd->hn", query.float(), keys[:, owner]) * (1.0 if fault == "scale ignored" else factor)
    if softcap and fault == "softcap before scale":
        scores = softcap * torch.tanh(scores / factor / softcap) * factor
    elif softcap and fault == "softcap clamps":
        scores = scores.clamp(-softcap, softcap)
    elif softcap and fault != "softcap ignored":
        scores = softcap * torch.tanh(scores / softcap)
    if fault == "scores in fp16":
        scores = scores.half().float()
    if fault == "maximum not taken off":
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    else:
        weights = torch.softmax(scores, dim=-1)
    if fault == "weights through bf16":
        weights = weights.bfloat16().float()
    return torch.einsum("hn,nhd->hd", weights, values[:, owner])


def _read(cache: Tensor, fault: str) -> Tensor:
    """The numbers of a cache in fp32."""
    values = cache.float()
    if cache.dtype == torch.float8_e4m3fn and fault == "fp8 bias of 8":
        return values / 2
    if cache.dtype == torch.float8_e4m3fn and fault == "fp8 subnormals flushed":
        return torch.where(values.abs() < 2.0**-6, 0.0, values)
    return values


def attention_prefill(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: Tensor | None = None,
    *,
    fault: str = "",
) -> Tensor:
    result = torch.zeros(query.shape)
    starts = cu_seqlens_q.tolist()
    for s, length in enumerate(seq_lens.tolist()):
        count = starts[s + 1] - starts[s]
        for i in range(count):
            seen = length - count + i + 1
            if fault == "not causal":
                seen = length
            elif fault == "prefix forgotten":
                seen = i + 1
            token = starts[s] + i
            pages = (query[token], k_cache, v_cache, block_table[s])
            result[token] = _attention(*pages, seen, scale, window, softcap, fault)
    return give(result, out, query.dtype)


def attention_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: Tensor | None = None,
    *,
    fault: str = "",
) -> Tensor:
    result = torch.zeros(query.shape)
    for s, length in enumerate(seq_lens.tolist()):
        result[s] = _attention(query[s], k_cache, v_cache, block_table[s], length, scale, window, softcap, fault)
    return give(result, out, query.dtype)
