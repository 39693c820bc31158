"""Native `rope`: query and key in one launch, in place; any strides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch

from rapid_llm.kernels.ops.arguments import check_disjoint, check_kind, check_written, token_strides
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles, warps_for
from rapid_llm.kernels.ops.triton_support import attempt, launch, tl, triton, use_triton
from rapid_llm.kernels.registry import ArgumentError


def rope(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Rotate query and key in place by their positions, in fp32. See `rapid_llm.kernels.rope`."""
    q_shape, k_shape = query.shape, key.shape
    if (
        len(q_shape) != 3
        or len(k_shape) != 3
        or q_shape[0] != k_shape[0]
        or q_shape[2] != k_shape[2]
        or positions.shape != q_shape[:1]
        or cos_sin_cache.dtype is not torch.float32
        or not query.device == positions.device == cos_sin_cache.device
    ):
        _refuse(query, key, positions, cos_sin_cache)
    rotary = cos_sin_cache.shape[-1]
    if cos_sin_cache.dim() != 2 or rotary % 2 or rotary > q_shape[2]:
        _refuse(query, key, positions, cos_sin_cache)
    check_kind("rope", "key", key, query)
    joint = side_by_side(query, key)
    if not joint:
        check_written("rope", "query", query)
        check_written("rope", "key", key)
        check_disjoint("rope", "query", query, "key", key)
    if use_triton("rope", query) and attempt("rope", _launch, query, key, positions, cos_sin_cache, interleaved):
        return
    rotate(query, key, positions, cos_sin_cache, interleaved, joint=joint)


def rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    interleaved: bool,
    *,
    joint: bool,
) -> None:
    """The op in PyTorch, of arguments known to fit; joint: `side_by_side(query, key)`."""
    tokens, heads, _ = query.shape
    if not tokens:
        return
    cos, sin = _angles(positions, table, tokens)
    if joint:
        _rotate(query, heads + key.shape[1], cos, sin, interleaved)
    else:
        _rotate(query, heads, cos, sin, interleaved)
        _rotate(key, key.shape[1], cos, sin, interleaved)


def _refuse(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> NoReturn:
    q_shape, k_shape = tuple(query.shape), tuple(key.shape)
    if len(q_shape) != 3 or len(k_shape) != 3 or q_shape[::2] != k_shape[::2]:
        raise ArgumentError(
            f"rope: query and key must be (tokens, heads, head_dim) of the same tokens and head_dim: got {q_shape} "
            f"and {k_shape}"
        )
    if positions.shape != q_shape[:1]:
        raise ArgumentError(f"rope: positions must have shape ({q_shape[0]},), got {tuple(positions.shape)}")
    if not query.device == positions.device == table.device:
        raise ArgumentError(
            f"rope: positions ({positions.device}) and cos_sin_cache ({table.device}) must be where query is, "
            f"{query.device}; CUDA and CPU do not mix"
        )
    raise ArgumentError(
        "rope: cos_sin_cache must be float32 (max_position, rotary_dim), rotary_dim even and at most head_dim "
        f"{q_shape[2]}: got {table.dtype} {tuple(table.shape)}"
    )


def _angles(positions: torch.Tensor, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as (tokens, 1, rotary_dim / 2). One token on the CPU reads them in place: no gather."""
    half = table.shape[1] // 2
    if tokens > 1 or table.is_cuda:
        table = table.index_select(0, positions)
        size, stride, start, step = (tokens, 1, half), (2 * half, 0, 1), 0, 1
    else:
        position = positions.item()
        if not 0 <= position < table.shape[0]:
            raise IndexError(
                f"rope: position {position} is outside cos_sin_cache, which holds {table.shape[0]} positions"
            )
        row, step = table.stride()
        size, stride, start = (1, 1, half), (0, 0, step), table.storage_offset() + int(position) * row
    return table.as_strided(size, stride, start), table.as_strided(size, stride, start + half * step)


def side_by_side(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether key's heads follow query's in memory, as in the output of a fused projection: then both are one tensor.

    No element is then shared: heads are as far apart as they are long, and tokens as all heads together.
    """
    tokens, heads, dim = query.shape
    token, head, step = query.stride()
    key_token, key_head, key_step = key.stride()
    return (
        head == key_head
        and step == key_step == 1
        and head >= dim
        and key.storage_offset() - query.storage_offset() == heads * head
        and (tokens == 1 or token == key_token >= (heads + key.shape[1]) * head)
        and key.untyped_storage().data_ptr() == query.untyped_storage().data_ptr()
    )


def _rotate(x: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """Rotate the `heads` heads that start where x starts; more than x has where key lies behind query."""
    tokens, half = x.shape[0], cos.shape[-1]
    token, head, step = x.stride()
    start = x.storage_offset()
    if interleaved and x.dtype is torch.float32 and step == 1 and not (token | head | start) & 1:
        pairs = x.as_strided((tokens, heads, half, 2), (token, head, 2, 1), start)
        torch.view_as_complex(pairs).mul_(torch.complex(cos, sin))
        return
    stride, second = ((token, head, 2 * step), step) if interleaved else ((token, head, step), half * step)
    a = x.as_strided((tokens, heads, half), stride, start)
    b = x.as_strided((tokens, heads, half), stride, start + second)
    if x.dtype is torch.float32:
        crossed = a * sin
        a.mul_(cos).addcmul_(b, sin, value=-1)
        b.mul_(cos).add_(crossed)
    else:  # 16-bit operands are promoted, so both results are fp32 and are rounded once
        first = torch.mul(a, cos).sub_(torch.mul(b, sin))
        b.copy_(torch.mul(b, cos).add_(torch.mul(a, sin)))
        a.copy_(first)


@tiles("rope")
def _tiles(sm: int, *, heads: int, half: int, itemsize: int) -> Mapping[str, int]:
    # About 1024 pairs a program: a token of a small model is one program, of a large one a few.
    pairs = next_power_of_2(half)
    block = min(next_power_of_2(heads), max(1, 1024 // pairs))
    return {"HEADS": block, "PAIRS": pairs, "num_warps": warps_for(block * pairs, per_thread=16 // itemsize)}


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, position_ptr, table_ptr, q_heads, heads, half, max_position, q_token, q_head, q_step,
    k_token, k_head, k_step, position_step, table_row, table_step,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :].to(tl.int64)
    position = tl.load(position_ptr + token * position_step).to(tl.int64)
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
    # Heads of query, then of key; a program may hold both.
    q_mask = (head < q_heads) & (pair < half)
    k_mask = (head >= q_heads) & (head < heads) & (pair < half)
    q_ptr += token * q_token + head * q_head
    k_ptr += token * k_token + (head - q_heads) * k_head
    q_a = tl.load(q_ptr + first * q_step, mask=q_mask, other=0.0).to(tl.float32)
    q_b = tl.load(q_ptr + second * q_step, mask=q_mask, other=0.0).to(tl.float32)
    k_a = tl.load(k_ptr + first * k_step, mask=k_mask, other=0.0).to(tl.float32)
    k_b = tl.load(k_ptr + second * k_step, mask=k_mask, other=0.0).to(tl.float32)
    dtype = q_ptr.dtype.element_ty
    tl.store(q_ptr + first * q_step, (q_a * cos - q_b * sin).to(dtype), mask=q_mask)
    tl.store(q_ptr + second * q_step, (q_b * cos + q_a * sin).to(dtype), mask=q_mask)
    tl.store(k_ptr + first * k_step, (k_a * cos - k_b * sin).to(dtype), mask=k_mask)
    tl.store(k_ptr + second * k_step, (k_b * cos + k_a * sin).to(dtype), mask=k_mask)


def _launch(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool
) -> None:
    tokens, q_heads, _ = query.shape
    heads, half = q_heads + key.shape[1], table.shape[1] // 2
    meta = resolve_tiles("rope", query.device, heads=heads, half=half, itemsize=query.element_size())
    args = (query, key, positions, table, q_heads, heads, half, table.shape[0])
    strides = (*token_strides(query), *token_strides(key), *token_strides(positions, 1), *table.stride())
    grid = (tokens, -(-heads // meta["HEADS"]))
    launch(_rope_kernel, grid, query.device, *args, *strides, INTERLEAVED=interleaved, **meta)
