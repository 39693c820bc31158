"""What every op should return, in float64 and independent of every row.

Each oracle takes the op's arguments by their schema names and never changes them. It returns float64: one tensor for
an op with one result, a tuple in schema order of the expected contents of the mutated arguments for an in-place op.
`sample`, whose result is a choice, returns the set of acceptable ids (`AcceptableIds`).

Expected values are *not* rounded to the op's dtype: the derived bounds (`rapid_llm.verify.bounds`) carry the rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rapid_llm.verify.formats import dequantise
from rapid_llm.verify.selection import AcceptableIds, acceptable_ids
from rapid_llm.verify.ulp import E4M3, LARGEST_E4M3, saturated

Expected = Tensor | tuple[Tensor, ...] | AcceptableIds


class OracleError(RuntimeError):
    """An oracle was about to give an answer that cannot serve as a reference."""


def _reference(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run without gradients, and refuse an answer that isn't float64 or that a TF32 setting could have touched."""

    @functools.wraps(function)
    def run(**args: Any) -> Any:
        on_cuda = any(isinstance(a, Tensor) and a.is_cuda for a in args.values())
        if on_cuda and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
            raise OracleError(f"{function.__name__}: TF32 is on; turn torch.backends.cuda.matmul.allow_tf32 off")
        with torch.no_grad():
            result = function(**args)
        for tensor in (result,) if isinstance(result, Tensor) else result:
            if isinstance(tensor, Tensor) and tensor.dtype not in (torch.float64, torch.bool):
                raise OracleError(f"{function.__name__}: the oracle gave {tensor.dtype}, not float64")
        return result

    return run


def _f64(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64)


@_reference
def scale(*, input: Tensor, factor: float) -> Tensor:
    """input * factor, any shape."""
    return _f64(input) * factor


@_reference
def silu_and_mul(*, input: Tensor) -> Tensor:
    """(..., 2d) -> (..., d): gate / (1 + exp(-gate)) * up."""
    half = input.shape[-1] // 2
    gate, up = _f64(input[..., :half]), _f64(input[..., half:])
    return gate / (1.0 + torch.exp(-gate)) * up


@_reference
def gelu_and_mul(*, input: Tensor) -> Tensor:
    """(..., 2d) -> (..., d): gate / (1 + exp(-2 u)) * up, u = sqrt(2 / pi) (gate + 0.044715 gate**3)."""
    half = input.shape[-1] // 2
    gate, up = _f64(input[..., :half]), _f64(input[..., half:])
    u = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
    return gate / (1.0 + torch.exp(-2.0 * u)) * up


def _rmsnorm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean_square = (values * values).sum(-1, keepdim=True) / values.shape[-1]
    return values / torch.sqrt(mean_square + eps) * weight


@_reference
def rmsnorm(*, input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """input / sqrt(mean(input**2, -1) + eps) * weight, (..., hidden)."""
    return _rmsnorm(_f64(input), _f64(weight), eps)


@_reference
def fused_add_rmsnorm(*, input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(norm of the unrounded sum, the sum itself): the new contents of input and residual."""
    total = _f64(input) + _f64(residual)
    return _rmsnorm(total, _f64(weight), eps), total


@_reference
def rope(
    *, query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """(query, key) rotated: each pair (a, b) becomes (a cos - b sin, b cos + a sin)."""
    rotary = cos_sin_cache.shape[-1]
    table = _f64(cos_sin_cache)[positions.to(torch.int64)]
    cos, sin = table[:, None, : rotary // 2], table[:, None, rotary // 2 :]
    rotated = []
    for tensor in (query, key):
        result = _f64(tensor).clone()
        first = slice(0, rotary, 2) if interleaved else slice(0, rotary // 2)
        second = slice(1, rotary, 2) if interleaved else slice(rotary // 2, rotary)
        a, b = _f64(tensor)[..., first], _f64(tensor)[..., second]
        result[..., first] = a * cos - b * sin
        result[..., second] = b * cos + a * sin
        rotated.append(result)
    return rotated[0], rotated[1]


@_reference
def embedding(*, input: Tensor, weight: Tensor, dtype: Any = None, scheme: str = "unquantized") -> Tensor:
    """Rows of the (dequantised) table; an id outside of it gives zeros, as on CUDA."""
    del dtype  # it decides the rounding only
    ids = input.reshape(-1).to(torch.int64)
    inside = (ids >= 0) & (ids < weight.shape[0])
    rows = weight[torch.where(inside, ids, torch.zeros_like(ids))] if weight.shape[0] else weight.new_zeros(0)
    values = _f64(rows) if scheme == "unquantized" else dequantise(rows, scheme)
    values = torch.where(inside[:, None], values, torch.zeros_like(values))
    return values.reshape(*input.shape, values.shape[-1])


@_reference
def linear(*, input: Tensor, weight: Tensor, bias: Tensor | None = None, scheme: str = "unquantized") -> Tensor:
    """input @ weight.T + bias over the exact (dequantised, unrounded) weight."""
    matrix = _f64(weight) if scheme == "unquantized" else dequantise(weight, scheme)
    result = _f64(input) @ matrix.T
    return result if bias is None else result + _f64(bias)


def gather_keys(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first `length` rows of one sequence, (length, kv_heads, head_dim), read through its block table (pages,)."""
    page_size = cache.shape[1]
    slots = torch.arange(length, device=cache.device)
    pages = block_table.to(torch.int64)[slots // page_size]
    return cache[pages, slots % page_size]


def visible_keys(queries: int, keys: int, first_visible: int, window: int = 0) -> Tensor:
    """(queries, keys) bool: query i sees the first `first_visible + i` keys, of these the last `window` if that is
    above 0."""
    limit = first_visible + torch.arange(queries)[:, None]
    position = torch.arange(keys)[None, :]
    seen = position < limit
    return seen & (position >= limit - window) if window else seen


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, first_visible: int, scale: float, window: int, softcap: float
) -> Tensor:
    """query (q, Hq, D) over keys, values (n, Hkv, D); query i sees `first_visible + i` keys, or the last of them."""
    group = query.shape[1] // keys.shape[1]
    keys = _f64(keys).repeat_interleave(group, dim=1)
    values = _f64(values).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,nhd->hqn", _f64(query), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_keys(query.shape[0], keys.shape[0], first_visible, window).to(query.device)
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    weights = torch.where(visible.any(-1)[:, None], weights, torch.zeros_like(weights))
    if bool(visible.all()) or bool(torch.isfinite(values).all()):
        return torch.einsum("hqn,nhd->qhd", weights, values)
    # A key that a query does not see must not reach it, not even as 0 * NaN.
    rows = [torch.einsum("hn,nhd->hd", weights[:, i, seen], values[seen]) for i, seen in enumerate(visible)]
    return torch.stack(rows)


@_reference
def attention_prefill(
    *,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of ragged chunks; query i of a chunk of q tokens sees keys 0 .. seq_len - q + i, or the last
    `window` of them."""
    result = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    starts = cu_seqlens_q.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        begin, end = starts[i], starts[i + 1]
        if begin == end:
            continue
        keys = gather_keys(k_cache, block_table[i], length)
        values = gather_keys(v_cache, block_table[i], length)
        first = length - (end - begin) + 1
        result[begin:end] = _attend(query[begin:end], keys, values, first, scale, window, softcap)
    return result


@_reference
def attention_decode(
    *,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of one token per sequence; a length of 0 gives zeros."""
    result = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for i, length in enumerate(seq_lens.tolist()):
        if length > 0:
            keys = gather_keys(k_cache, block_table[i], length)
            values = gather_keys(v_cache, block_table[i], length)
            result[i : i + 1] = _attend(query[i : i + 1], keys, values, length, scale, window, softcap)
    return result


def held(values: Tensor, cache: Tensor) -> Tensor:
    """`values` (float64) as `cache` holds them: exactly, or `saturated` in e4m3."""
    return saturated(values) if cache.dtype == E4M3 else values


@_reference
def kvcache_write(
    *, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """The caches after the writes, exact (`held`); a negative slot writes nothing."""
    return _written(held(_f64(key), k_cache), held(_f64(value), v_cache), k_cache, v_cache, slot_mapping)


def _written(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    caches = []
    page_size = k_cache.shape[1]
    slots = slot_mapping.to(torch.int64)
    keep = slots >= 0
    for source, cache in ((key, k_cache), (value, v_cache)):
        result = _f64(cache).clone()
        result[slots[keep] // page_size, slots[keep] % page_size] = source[keep]
        caches.append(result)
    return caches[0], caches[1]


@_reference
def rope_kvcache_write(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query, key, k_cache, v_cache): rotation, then the write of the exact rotated key, within the cache's range."""
    query, key = rope(query=query, key=key, positions=positions, cos_sin_cache=cos_sin_cache, interleaved=interleaved)
    limit = LARGEST_E4M3 if k_cache.dtype == E4M3 else float("inf")
    kept = key.clamp(-limit, limit)
    return query, key, *_written(kept, held(_f64(value), v_cache), k_cache, v_cache, slot_mapping)


@_reference
def sample(
    *, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> AcceptableIds:
    """Every id that a row computing in fp32 may return, per row of logits; exactly one where the choice is clear."""
    return acceptable_ids(
        _f64(logits), _f64(temperature), top_k.to(torch.int64), _f64(top_p), _f64(min_p), _f64(uniform)
    )
