"""Native `kvcache.write`: each token's key and value into its slot, one launch; any strides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch

from rapid_llm.kernels.ops.arguments import check_kind, check_written, token_strides
from rapid_llm.kernels.ops.e4m3 import E4M3, as_bytes, encode_e4m3, stored
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles, warps_for
from rapid_llm.kernels.ops.triton_support import attempt, launch, tl, triton, use_triton
from rapid_llm.kernels.registry import ArgumentError


def kvcache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store keys and values in their cache slots, in place. See `rapid_llm.kernels.kvcache_write`."""
    check_fit(key, value, k_cache, v_cache, slot_mapping)
    check_written("kvcache.write", "k_cache", k_cache)
    check_written("kvcache.write", "v_cache", v_cache)
    if use_triton("kvcache.write", key) and attempt(
        "kvcache.write", _launch, key, value, k_cache, v_cache, slot_mapping
    ):
        return
    write(key, value, k_cache, v_cache, slot_mapping)


def write(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """The op in PyTorch, of arguments known to fit."""
    if not key.shape[0]:
        return
    key, value = stored(key, k_cache.dtype), stored(value, v_cache.dtype)
    if key.is_cuda:
        _write_masked(key, value, k_cache, v_cache, slot_mapping)
    else:
        _write_host(key, value, k_cache, v_cache, slot_mapping.tolist())


def check_fit(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Raise `ArgumentError` unless shapes, dtypes and devices are those of the op."""
    shape, cache = key.shape, k_cache.shape
    if (
        len(shape) != 3
        or len(cache) != 4
        or value.shape != shape
        or v_cache.shape != cache
        or cache[2] != shape[1]
        or cache[3] != shape[2]
        or slots.shape != shape[:1]
        or slots.dtype is not torch.int64
        or not (key.dtype == value.dtype and k_cache.dtype == v_cache.dtype)
        or (k_cache.dtype != key.dtype and k_cache.dtype is not E4M3)
        or not key.device == value.device == k_cache.device == v_cache.device == slots.device
    ):
        _refuse(key, value, k_cache, v_cache, slots)


def check_cache(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor, key: torch.Tensor) -> None:
    """Raise unless the caches are where key is, and of its dtype or both of float8_e4m3fn."""
    if not (k_cache.dtype is E4M3 and k_cache.device == key.device):
        check_kind(op, "k_cache", k_cache, key)
    check_kind(op, "v_cache", v_cache, k_cache)


def _refuse(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> NoReturn:
    shape = key.shape
    check_kind("kvcache.write", "value", value, key)
    check_cache("kvcache.write", k_cache, v_cache, key)
    if slots.shape != shape[:1] or slots.dtype is not torch.int64 or slots.device != key.device:
        raise ArgumentError(
            f"kvcache.write: slot_mapping must be int64 of shape {tuple(shape[:1])} on {key.device}: got {slots.dtype} "
            f"{tuple(slots.shape)} on {slots.device}"
        )
    raise ArgumentError(
        "kvcache.write: key and value must have the same shape (tokens, kv_heads, head_dim), and the caches the same "
        f"shape (pages, page_size, kv_heads, head_dim): got {tuple(shape)}, {tuple(value.shape)}, "
        f"{tuple(k_cache.shape)}, {tuple(v_cache.shape)}"
    )


def _write_host(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: list[int]
) -> None:
    """On the CPU the slots are read by the host: a run of consecutive ones is one copy a cache."""
    tokens, first = len(slots), slots[0]
    pages, page_size = k_cache.shape[:2]
    if max(slots) >= pages * page_size:
        raise IndexError(f"kvcache.write: slot {max(slots)} is outside the cache of {pages} pages of {page_size}")
    if first >= 0 and (tokens == 1 or slots == list(range(first, first + tokens))):
        _copy_run(key, k_cache, first)
        _copy_run(value, v_cache, first)
        return
    kept = [i for i, slot in enumerate(slots) if slot >= 0]
    if len(kept) < tokens:
        tokens_kept = torch.tensor(kept, dtype=torch.int64)
        key, value = key.index_select(0, tokens_kept), value.index_select(0, tokens_kept)
    index = torch.tensor([slots[i] for i in kept], dtype=torch.int64)
    _scatter(key, k_cache, index)
    _scatter(value, v_cache, index)


def _copy_run(source: torch.Tensor, cache: torch.Tensor, first: int) -> None:
    """Write slots first, first + 1, ... with one copy where the cache's rows follow each other through its pages."""
    tokens = source.shape[0]
    page_size = cache.shape[1]
    page, row, head, step = cache.stride()
    if tokens == 1 or page == page_size * row:
        start = cache.storage_offset() + first // page_size * page + first % page_size * row
        cache.as_strided(source.shape, (row, head, step), start).copy_(source)
    else:
        _scatter(source, cache, torch.arange(first, first + tokens))


def _scatter(source: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    page_size = cache.shape[1]
    cache.index_put_((slots // page_size, slots % page_size), source)


def _write_masked(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """On CUDA without Triton: no host read, so a graph may capture it.

    `index_put_` cannot skip a token, so padding writes what is written anyway: the value of a real token into that
    token's slot, or, where there is no real token, slot 0's own content.
    """
    pages, page_size = k_cache.shape[:2]
    real = (slots >= 0) & (slots < pages * page_size)
    order = torch.argmax(real.to(torch.uint8))  # some real token, or 0 if there is none
    any_real = real.any()
    owner = torch.where(real, torch.arange(len(slots), device=slots.device), order)
    target = slots.index_select(0, owner).clamp(0, max(pages * page_size - 1, 0))
    page, row = target // page_size, target % page_size
    for source, cache in ((key, k_cache), (value, v_cache)):
        kept = torch.where(any_real, source.index_select(0, owner), cache[page, row])
        cache.index_put_((page, row), kept)


@tiles("kvcache.write")
def _tiles(sm: int, *, heads: int, dim: int, itemsize: int) -> Mapping[str, int]:
    columns = next_power_of_2(dim)
    block = min(next_power_of_2(heads), max(1, 2048 // columns))
    return {"HEADS": block, "COLUMNS": columns, "num_warps": warps_for(block * columns, per_thread=16 // itemsize)}


@triton.jit
def _kvcache_write_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, slots, page_size, heads, dim, slot_step,
    k_token, k_head, k_step, v_token, v_head, v_step,
    kc_page, kc_row, kc_head, kc_step, vc_page, vc_row, vc_head, vc_step,
    FP8: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)[:, None]
    col = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    slot = tl.load(slot_ptr + token * slot_step).to(tl.int64)
    # Padding, and a slot beyond the cache, write nothing.
    mask = (head < heads) & (col < dim) & (slot >= 0) & (slot < slots)
    page = slot // page_size
    row = slot % page_size
    k = tl.load(k_ptr + token * k_token + head * k_head + col * k_step, mask=mask)
    v = tl.load(v_ptr + token * v_token + head * v_head + col * v_step, mask=mask)
    if FP8:
        k = encode_e4m3(k.to(tl.float32))
        v = encode_e4m3(v.to(tl.float32))
    tl.store(k_cache_ptr + page * kc_page + row * kc_row + head * kc_head + col * kc_step, k, mask=mask)
    tl.store(v_cache_ptr + page * vc_page + row * vc_row + head * vc_head + col * vc_step, v, mask=mask)


def _launch(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    tokens, heads, dim = key.shape
    pages, page_size = k_cache.shape[:2]
    meta = resolve_tiles("kvcache.write", key.device, heads=heads, dim=dim, itemsize=key.element_size())
    caches, fp8 = (as_bytes(k_cache), as_bytes(v_cache)), k_cache.dtype is E4M3
    args = (key, value, *caches, slots, pages * page_size, page_size, heads, dim, *token_strides(slots, 1))
    strides = (*token_strides(key), *token_strides(value), *k_cache.stride(), *v_cache.stride())
    grid = (tokens, -(-heads // meta["HEADS"]))
    launch(_kvcache_write_kernel, grid, key.device, *args, *strides, FP8=fp8, **meta)
