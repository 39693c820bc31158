"""Native `rope_kvcache_write`: rotation and cache write in one launch; elsewhere the two native ops, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch

from rapid_llm.kernels.ops.arguments import check_disjoint, check_kind, check_written, token_strides
from rapid_llm.kernels.ops.e4m3 import E4M3, as_bytes, encode_e4m3
from rapid_llm.kernels.ops.kvcache.kvcache_write import check_cache, write
from rapid_llm.kernels.ops.rope.rope import rotate, side_by_side
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles, warps_for
from rapid_llm.kernels.ops.triton_support import attempt, launch, tl, triton, use_triton
from rapid_llm.kernels.registry import ArgumentError

OP = "rope_kvcache_write"


def rope_kvcache_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Rotate query and key in place, then cache key and value. See `rapid_llm.kernels.rope_kvcache_write`."""
    check_fit(query, key, value, k_cache, v_cache, positions, cos_sin_cache, slot_mapping)
    joint = side_by_side(query, key)
    if not (joint and _value_follows(query, key, value)):
        _check_apart(query, key, value)
    check_written(OP, "k_cache", k_cache)
    check_written(OP, "v_cache", v_cache)
    args = (query, key, value, k_cache, v_cache, positions, cos_sin_cache, slot_mapping)
    if use_triton(OP, query) and attempt(OP, _launch, *args, interleaved):
        return
    rotate(query, key, positions, cos_sin_cache, interleaved, joint=joint)
    write(key, value, k_cache, v_cache, slot_mapping)


def _value_follows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether value's heads follow key's as key's follow query's, a token's heads all before the next token's."""
    if not side_by_side(key, value):
        return False
    heads = query.shape[1] + 2 * key.shape[1]
    return query.shape[0] == 1 or query.stride(0) >= heads * query.stride(1)


def _check_apart(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    check_written(OP, "query", query)
    check_written(OP, "key", key)
    check_disjoint(OP, "query", query, "key", key)
    check_disjoint(OP, "query", query, "value", value)
    check_disjoint(OP, "key", key, "value", value)


def check_fit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Raise `ArgumentError` unless shapes, dtypes and devices are those of the op."""
    q_shape, shape, cache, rows = query.shape, key.shape, k_cache.shape, table.shape
    if (
        len(q_shape) != 3
        or len(shape) != 3
        or len(cache) != 4
        or len(rows) != 2
        or value.shape != shape
        or v_cache.shape != cache
        or q_shape[0] != shape[0]
        or not q_shape[2] == shape[2] == cache[3] >= rows[1]
        or cache[2] != shape[1]
        or rows[1] % 2
        or not positions.shape == slots.shape == shape[:1]
        or table.dtype is not torch.float32
        or slots.dtype is not torch.int64
        or (positions.dtype is not torch.int64 and positions.dtype is not torch.int32)
        or not (query.dtype == key.dtype == value.dtype and k_cache.dtype == v_cache.dtype)
        or (k_cache.dtype != key.dtype and k_cache.dtype is not E4M3)
        or not query.device == key.device == value.device == k_cache.device == v_cache.device
        or not query.device == positions.device == table.device == slots.device
    ):
        _refuse(query, key, value, k_cache, v_cache, positions, table, slots)


def _refuse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
) -> NoReturn:
    for name, tensor in (("key", key), ("value", value)):
        check_kind(OP, name, tensor, query)
    check_cache(OP, k_cache, v_cache, key)
    for name, tensor in (("positions", positions), ("cos_sin_cache", table), ("slot_mapping", slots)):
        if tensor.device != query.device:
            raise ArgumentError(
                f"{OP}: {name} must be where query is, {query.device}: got {tensor.device}; CUDA and CPU do not mix"
            )
    tokens = tuple(query.shape[:1])
    if positions.shape != tokens or positions.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"{OP}: positions must be int32 or int64 of shape {tokens}: got {positions.dtype} {tuple(positions.shape)}"
        )
    if slots.shape != tokens or slots.dtype is not torch.int64:
        raise ArgumentError(
            f"{OP}: slot_mapping must be int64 of shape {tokens}: got {slots.dtype} {tuple(slots.shape)}"
        )
    rotary = table.shape[-1] if table.dim() == 2 else -1
    if table.dtype is not torch.float32 or rotary < 0 or rotary % 2 or rotary > query.shape[-1]:
        raise ArgumentError(
            f"{OP}: cos_sin_cache must be float32 (max_position, rotary_dim), rotary_dim even and at most head_dim "
            f"{query.shape[-1]}: got {table.dtype} {tuple(table.shape)}"
        )
    raise ArgumentError(
        f"{OP}: key and value must have the same shape (tokens, kv_heads, head_dim), query the same but for its heads, "
        "and the caches the same shape (pages, page_size, kv_heads, head_dim): got "
        + ", ".join(str(tuple(t.shape)) for t in (key, value, query, k_cache, v_cache))
    )


@tiles(OP)
def _tiles(sm: int, *, heads: int, dim: int, itemsize: int) -> Mapping[str, int]:
    # About 2048 elements a program: a token of a small model is one program, of a large one a few.
    columns = next_power_of_2(dim)
    block = min(next_power_of_2(heads), max(1, 2048 // columns))
    return {"HEADS": block, "COLUMNS": columns, "num_warps": warps_for(block * columns, per_thread=32 // itemsize)}


@triton.jit
def _rope_kvcache_write_kernel(
    q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, position_ptr, table_ptr, slot_ptr,
    q_heads, heads, dim, half, max_position, slots, page_size,
    q_token, q_head, q_step, k_token, k_head, k_step, v_token, v_head, v_step,
    kc_page, kc_row, kc_head, kc_step, vc_page, vc_row, vc_head, vc_step,
    position_step, table_row, table_step, slot_step,
    FP8: tl.constexpr, INTERLEAVED: tl.constexpr, REST: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    # Heads of query, then of key; a program may hold both.
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)[:, None]
    kv_head = head - q_heads
    pair = tl.arange(0, PAIRS)[None, :].to(tl.int64)
    col = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    position = tl.load(position_ptr + token * position_step).to(tl.int64)
    slot = tl.load(slot_ptr + token * slot_step).to(tl.int64)
    # A position outside the table must not read beyond it: NaN makes the fault visible.
    known = (pair < half) & (position >= 0) & (position < max_position)
    table_ptr += position * table_row
    cos = tl.load(table_ptr + pair * table_step, mask=known, other=float("nan"))
    sin = tl.load(table_ptr + (pair + half) * table_step, mask=known, other=float("nan"))
    if INTERLEAVED:
        first = pair * 2
        second = pair * 2 + 1
    else:
        first = pair
        second = pair + half
    q_mask = (head < q_heads) & (pair < half)
    kv = (head >= q_heads) & (head < heads)
    k_mask = kv & (pair < half)
    q_ptr += token * q_token + head * q_head
    k_ptr += token * k_token + kv_head * k_head
    q_a = tl.load(q_ptr + first * q_step, mask=q_mask, other=0.0).to(tl.float32)
    q_b = tl.load(q_ptr + second * q_step, mask=q_mask, other=0.0).to(tl.float32)
    k_a = tl.load(k_ptr + first * k_step, mask=k_mask, other=0.0).to(tl.float32)
    k_b = tl.load(k_ptr + second * k_step, mask=k_mask, other=0.0).to(tl.float32)
    # Padding, and a slot beyond the cache, write nothing into it.
    kept = kv & (slot >= 0) & (slot < slots)
    v = tl.load(v_ptr + token * v_token + kv_head * v_head + col * v_step, mask=kept & (col < dim))
    dtype = q_ptr.dtype.element_ty
    tl.store(q_ptr + first * q_step, (q_a * cos - q_b * sin).to(dtype), mask=q_mask)
    tl.store(q_ptr + second * q_step, (q_b * cos + q_a * sin).to(dtype), mask=q_mask)
    turned = (k_a * cos - k_b * sin).to(dtype)
    crossed = (k_b * cos + k_a * sin).to(dtype)
    tl.store(k_ptr + first * k_step, turned, mask=k_mask)
    tl.store(k_ptr + second * k_step, crossed, mask=k_mask)
    page = slot // page_size
    row = slot % page_size
    k_cache_ptr += page * kc_page + row * kc_row + kv_head * kc_head
    v_cache_ptr += page * vc_page + row * vc_row + kv_head * vc_head
    if FP8:
        turned = encode_e4m3(turned.to(tl.float32))
        crossed = encode_e4m3(crossed.to(tl.float32))
        v = encode_e4m3(v.to(tl.float32))
    tl.store(k_cache_ptr + first * kc_step, turned, mask=kept & (pair < half))
    tl.store(k_cache_ptr + second * kc_step, crossed, mask=kept & (pair < half))
    if REST:
        rest = kept & (col >= 2 * half) & (col < dim)
        k = tl.load(k_ptr + col * k_step, mask=rest)
        if FP8:
            k = encode_e4m3(k.to(tl.float32))
        tl.store(k_cache_ptr + col * kc_step, k, mask=rest)
    tl.store(v_cache_ptr + col * vc_step, v, mask=kept & (col < dim))


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    interleaved: bool,
) -> None:
    tokens, q_heads, dim = query.shape
    pages, page_size = k_cache.shape[:2]
    heads, half = q_heads + key.shape[1], table.shape[1] // 2
    meta = resolve_tiles(OP, query.device, heads=heads, dim=dim, itemsize=query.element_size())
    args = (query, key, value, as_bytes(k_cache), as_bytes(v_cache), positions, table, slots)
    sizes = (q_heads, heads, dim, half, table.shape[0], pages * page_size, page_size)
    strides = (
        *(*token_strides(query), *token_strides(key), *token_strides(value), *k_cache.stride(), *v_cache.stride()),
        *(*token_strides(positions, 1), *table.stride(), *token_strides(slots, 1)),
    )
    form = {
        "FP8": k_cache.dtype is E4M3,
        "INTERLEAVED": interleaved,
        "REST": 2 * half < dim,
        "PAIRS": next_power_of_2(half),
    }
    grid = (tokens, -(-heads // meta["HEADS"]))
    launch(_rope_kvcache_write_kernel, grid, query.device, *args, *sizes, *strides, **form, **meta)
