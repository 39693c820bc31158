"""How much memory traffic and arithmetic a call needs at least: what a benchmark divides by the time.

Bytes count storage that has to be read or written once, not elements: an expanded tensor (stride 0) counts what it
holds. FLOPs count a multiplication and an addition as two, an elementary function as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from rapid_llm.kernels.ops.block_formats import row_elements


@dataclass(frozen=True, slots=True)
class Work:
    """read_bytes, write_bytes: the least traffic. flops: the arithmetic of the op's definition."""

    read_bytes: int
    write_bytes: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes


def unique_bytes(tensor: Tensor) -> int:
    """Bytes of distinct elements: dimensions of stride 0 count once, and overlapping windows no more than their
    span."""
    if tensor.numel() == 0:
        return 0
    count, reach = 1, 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride != 0:
            count *= size
            reach += (size - 1) * abs(stride)
    return int(min(count, reach) * tensor.element_size())


def scale(*, input: Tensor, factor: float) -> Work:
    """One product for each element."""
    del factor
    return Work(unique_bytes(input), input.numel() * input.element_size(), input.numel())


def silu_and_mul(*, input: Tensor) -> Work:
    """exp, sum, division and two products for each result."""
    count = input.numel() // 2
    return Work(unique_bytes(input), count * input.element_size(), 5 * count)


def gelu_and_mul(*, input: Tensor) -> Work:
    """As silu_and_mul, with three products and a sum more for the exponent."""
    count = input.numel() // 2
    return Work(unique_bytes(input), count * input.element_size(), 9 * count)


def rmsnorm(*, input: Tensor, weight: Tensor, eps: float = 1e-6) -> Work:
    """Square and sum, then two products."""
    del eps
    return Work(unique_bytes(input) + unique_bytes(weight), input.numel() * input.element_size(), 4 * input.numel())


def fused_add_rmsnorm(*, input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Work:
    """As rmsnorm, with one addition; both tensors are read and written."""
    del eps
    both = unique_bytes(input) + unique_bytes(residual)
    return Work(both + unique_bytes(weight), both, 5 * input.numel())


def rope(*, query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool = False) -> Work:
    """Three operations for each rotated element; only the rotated part is touched, and each position's row once."""
    del interleaved
    tokens, rotary = positions.numel(), cos_sin_cache.shape[-1]
    elements = tokens * (query.shape[1] + key.shape[1]) * rotary
    size = query.element_size()
    rows = min(tokens, cos_sin_cache.shape[0]) * rotary * cos_sin_cache.element_size()
    return Work(elements * size + rows + unique_bytes(positions), elements * size, 3 * elements)


def _width(weight: Tensor, scheme: str) -> int:
    return weight.shape[1] if scheme == "unquantized" else row_elements(weight.shape[1], scheme)


def embedding(*, input: Tensor, weight: Tensor, dtype: Any = None, scheme: str = "unquantized") -> Work:
    """The rows asked for, at most the whole table; a product and an addition for each dequantised weight."""
    hidden = _width(weight, scheme)
    rows = min(input.numel(), weight.shape[0])
    own = weight.element_size() if scheme == "unquantized" else 4
    size = own if dtype is None else dtype.itemsize
    count = input.numel() * hidden
    read = unique_bytes(input) + rows * weight.shape[1] * weight.element_size()
    return Work(read, count * size, 0 if scheme == "unquantized" else 2 * count)


def linear(*, input: Tensor, weight: Tensor, bias: Tensor | None = None, scheme: str = "unquantized") -> Work:
    """2 M N K; the weight in the bytes that it is stored in."""
    k, n = _width(weight, scheme), weight.shape[0]
    m = input.numel() // max(input.shape[-1], 1)
    read = unique_bytes(input) + unique_bytes(weight) + (0 if bias is None else unique_bytes(bias))
    return Work(read, m * n * input.element_size(), 2 * m * n * k + (0 if bias is None else m * n))


def kvcache_write(*, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> Work:
    """Keys and values of the tokens that have a slot, read and written once."""
    del k_cache
    kept = int((slot_mapping >= 0).sum())
    moved = 2 * kept * key.shape[1] * key.shape[2]
    return Work(moved * value.element_size() + unique_bytes(slot_mapping), moved * v_cache.element_size(), 0)


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
) -> Work:
    """rope, and the write of what it has at hand: of a kept token's key only the part not rotated is read as well."""
    turned = rope(query=query, key=key, positions=positions, cos_sin_cache=cos_sin_cache, interleaved=interleaved)
    stored = kvcache_write(key=key, value=value, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    kept = int((slot_mapping >= 0).sum())
    again = kept * key.shape[1] * cos_sin_cache.shape[-1] * key.element_size()
    return Work(turned.read_bytes + stored.read_bytes - again, turned.write_bytes + stored.write_bytes, turned.flops)


def _attention(query: Tensor, cache: Tensor, seen: list[int], pairs: int, index_bytes: int, softcap: float) -> Work:
    """`seen`: keys of each sequence; `pairs`: visible (query, key) pairs over all sequences."""
    keys = sum(seen) * cache.shape[2] * cache.shape[3] * cache.element_size()
    flops = pairs * query.shape[1] * (4 * query.shape[2] + 4 + (3 if softcap else 0))
    written = query.numel() * query.element_size()
    return Work(unique_bytes(query) + 2 * keys + index_bytes, written, flops)


def _table_bytes(seen: list[int], cache: Tensor, block_table: Tensor) -> int:
    page = int(cache.shape[1])
    return sum(-(-n // page) for n in seen) * int(block_table.element_size())


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
) -> Work:
    """Each key and value that some query of the sequence sees, once; 4 D + 4 operations for each visible pair and
    head, three more where scores are capped."""
    del v_cache, scale
    starts, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    chunks = [end - begin for begin, end in pairwise(starts)]
    wide = window or max([0, *lengths])
    seen = [min(n, wide + q - 1) if q else 0 for q, n in zip(chunks, lengths, strict=True)]
    pairs = sum(min(max(n - q + i + 1, 0), wide) for q, n in zip(chunks, lengths, strict=True) for i in range(q))
    index = unique_bytes(cu_seqlens_q) + unique_bytes(seq_lens) + _table_bytes(seen, k_cache, block_table)
    return _attention(query, k_cache, seen, pairs, index, softcap)


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
) -> Work:
    """Each sequence's keys and values that its query sees, once."""
    del v_cache, scale
    seen = [min(n, window) if window else n for n in seq_lens.tolist()]
    index = unique_bytes(seq_lens) + _table_bytes(seen, k_cache, block_table)
    return _attention(query, k_cache, seen, sum(seen), index, softcap)


def sample(
    *, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Work:
    """The logits once, an exponential and two sums for each; sorting, where a filter needs it, is the row's own
    affair."""
    parameters = sum(unique_bytes(t) for t in (temperature, top_k, top_p, min_p, uniform))
    return Work(unique_bytes(logits) + parameters, logits.shape[0] * 8, 4 * logits.numel())
