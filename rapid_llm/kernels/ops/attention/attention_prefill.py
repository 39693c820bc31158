"""Native `attention.prefill`: causal attention of ragged chunks over the paged cache.

On CUDA the grid follows from shapes alone. Sequence i owns the tiles from `cu_seqlens_q[i] // BLOCK_Q + i` on, always
enough for its chunk, so that a program finds its sequence by bisection and no length ever reaches the host. The tokens
behind the last chunk (padding) count as one more sequence without keys. A tile holds BLOCK_Q tokens times the query
heads of one kv head: keys are read once for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import scaled_dot_product_attention

from rapid_llm.kernels.ops.attention._online_softmax import attend_block, block_rows
from rapid_llm.kernels.ops.attention._paged import (
    LOG2_E,
    allocate,
    attend_capped,
    attend_exactly,
    check_attention,
    check_limits,
    loops_by_while,
    probability_parts,
    sequence_heads,
)
from rapid_llm.kernels.ops.e4m3 import E4M3, as_bytes, decode_e4m3, settled
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles
from rapid_llm.kernels.ops.triton_support import attempt, launch, tl, triton, use_triton
from rapid_llm.kernels.registry import ArgumentError

_OP = "attention.prefill"
_CPU_BLOCK = 256
"""Queries that share one mask on CPU: keys after the block's last query are never touched."""


def attention_prefill(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of ragged query chunks over the paged cache. See `rapid_llm.kernels.attention_prefill`.

    Tokens behind `cu_seqlens_q[-1]` are padding and give zeros. On CPU a sequence longer than its block table, or a
    page outside the cache, is an `ArgumentError`; on CUDA keys beyond the table are not read.
    """
    check_attention(_OP, query, k_cache, v_cache, seq_lens, block_table)
    if window or softcap:
        check_limits(_OP, window, softcap)
    if cu_seqlens_q.ndim != 1 or cu_seqlens_q.shape[0] != seq_lens.shape[0] + 1:
        raise ArgumentError(
            f"{_OP}: cu_seqlens_q must have {seq_lens.shape[0] + 1} entries, got shape {tuple(cu_seqlens_q.shape)}"
        )
    if cu_seqlens_q.dtype not in (torch.int32, torch.int64) or cu_seqlens_q.device != query.device:
        raise ArgumentError(
            f"{_OP}: cu_seqlens_q must be int32 on {query.device}, got {cu_seqlens_q.dtype} on {cu_seqlens_q.device}"
        )
    out = allocate(_OP, query, out)
    args = (query, k_cache, v_cache, cu_seqlens_q, seq_lens, block_table, float(scale), int(window), float(softcap))
    if use_triton(_OP, query) and attempt(_OP, _launch, *args, out):
        return out
    return _prefill_by_sequence(*args, out)


def _prefill_by_sequence(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    out: torch.Tensor,
) -> torch.Tensor:
    bounds, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > query.shape[0]:
        raise ArgumentError(
            f"{_OP}: cu_seqlens_q must rise from 0 to at most {query.shape[0]} (the tokens of query), got {bounds}"
        )
    page_size = k_cache.shape[1]
    out[bounds[-1] :] = 0
    for i, length in enumerate(lengths):
        begin, end = bounds[i], bounds[i + 1]
        blind = min(max(end - begin - length, 0), end - begin)  # leading tokens of a chunk longer than its sequence
        out[begin : begin + blind] = 0
        begin += blind
        if begin == end:
            continue
        pages = block_table[i, : -(-length // page_size)].tolist()
        before = length - (end - begin)  # keys that the first token has behind it
        start = max(before + 1 - window, 0) if window else 0
        keys, values = sequence_heads(_OP, i, k_cache, v_cache, block_table, pages, length, start)
        rows = query[begin:end].transpose(0, 1).unsqueeze(0)
        if keys.dtype != torch.float32:  # 16-bit probabilities would not be accurate enough; fp8 has no product
            rows, keys, values = rows.float(), keys.float(), values.float()
        for at in range(0, end - begin, _CPU_BLOCK):
            block = rows[:, :, at : at + _CPU_BLOCK]
            last, first = before + at + block.shape[2] - start, max(before + at + 1 - window - start, 0)
            seen = slice(first if window else 0, last)
            found = _attend_causal(block, keys[:, :, seen], values[:, :, seen], scale, window, softcap)
            out[begin + at : begin + at + block.shape[2]] = found[0].transpose(0, 1)
    return out


def _attend_causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0
) -> torch.Tensor:
    """Attention of (1, heads, rows, dim) queries, the last of which sees every key up to the last one and each earlier
    one a key less; a window ends what it sees at the other end."""
    rows, length = query.shape[2], keys.shape[2]
    if query.is_cuda or softcap:
        hidden = torch.ones(rows, length, dtype=torch.bool, device=query.device).triu_(length - rows + 1)
        if window:
            hidden |= torch.ones_like(hidden).tril_(length - rows - window)
        attend = attend_exactly if query.is_cuda else attend_capped
        return attend(query, keys, values, hidden, scale, softcap)
    if not scale > 0:  # torch scales its mask along with the scores: -inf must stay -inf
        query, scale = query * scale, 1.0
    narrow = 0 < window < length
    if rows == 1:
        return scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True)
    if rows == length and not narrow:  # torch's own causal mask counts from the first key
        return scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    mask = torch.full((rows, length), float("-inf")).triu_(length - rows + 1)
    if narrow:
        mask += torch.full((rows, length), float("-inf")).tril_(length - rows - window)
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)


@tiles(_OP)
def _tiles(sm: int, *, head_dim: int, group: int, itemsize: int, rows: int) -> Mapping[str, int]:
    """rows: about how many rows (tokens times heads of a kv head) a sequence brings, a power of two."""
    block_d = max(16, next_power_of_2(head_dim))
    if itemsize == 4:  # products on the ordinary units: what fits into registers
        block_m, block_n, warps = {16: 64, 32: 64, 64: 64, 128: 32}.get(block_d, 16), 32 if block_d <= 64 else 16, 8
    else:
        block_m, block_n, warps = 128 if block_d <= 128 else 64, min(64, max(16, 8192 // block_d)), 8
    block_m = min(max(16, rows), block_m)
    if itemsize == 2 and block_m <= 64:
        warps = 4
    return {"BLOCK_M": block_m, "BLOCK_D": block_d, "BLOCK_N": block_n, "num_warps": warps, "num_stages": 2}


@triton.jit(
    do_not_specialize=[
        *("tokens", "sequences", "max_keys", "window", "stride_cu", "stride_lens", "stride_ts", "stride_te")
    ]
)
def _prefill(
    query_ptr, k_ptr, v_ptr, cu_ptr, lens_ptr, table_ptr, out_ptr, scale_log2, cap_log2, tokens, sequences, max_keys,
    window,
    stride_qt, stride_qh, stride_qd, stride_kp, stride_kr, stride_kh, stride_kd,
    stride_vp, stride_vr, stride_vh, stride_vd, stride_cu, stride_lens, stride_ts, stride_te,
    stride_ot, stride_oh, stride_od,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, MEMBERS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, FP8: tl.constexpr, PARTS: tl.constexpr, SHIFT: tl.constexpr,
    BY_WHILE: tl.constexpr,
):  # fmt: skip
    # The last tiles of a sequence see the most keys: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    low = tile * 0
    high = sequences + low
    while low < high:
        middle = (low + high + 1) // 2
        starts = tl.load(cu_ptr + middle.to(tl.int64) * stride_cu).to(tl.int32) // BLOCK_Q + middle <= tile
        low = tl.where(starts, middle, low)
        high = tl.where(starts, high, middle - 1)
    sequence = low.to(tl.int64)
    real = low < sequences
    begin = tl.load(cu_ptr + sequence * stride_cu).to(tl.int32)
    end = tl.load(cu_ptr + (sequence + 1) * stride_cu, mask=real, other=0).to(tl.int32)
    end = tl.where(real, end, tokens)
    length = tl.load(lens_ptr + sequence * stride_lens, mask=real, other=0).to(tl.int32)
    length = tl.minimum(length, max_keys)

    SLICES: tl.constexpr = (GROUP + MEMBERS - 1) // MEMBERS
    kv_head = (tl.program_id(1) // SLICES).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    member = (tl.program_id(1) % SLICES) * MEMBERS + row % MEMBERS
    first = (tile - begin // BLOCK_Q - low) * BLOCK_Q
    token = first + row // MEMBERS
    head = kv_head * GROUP + member
    dim = tl.arange(0, BLOCK_D).to(tl.int64)
    real_row = (token < end - begin) & (row < BLOCK_Q * MEMBERS) & (member < GROUP)
    used = real_row[:, None] & (dim < HEAD_DIM)[None, :]
    at = (begin + token).to(tl.int64)
    q = tl.load(
        query_ptr + (at * stride_qt + head * stride_qh)[:, None] + dim[None, :] * stride_qd, mask=used, other=0.0
    )
    if PARTS == 0:
        q = q.to(tl.float32)

    # Token t of the chunk sees the keys before `before + t + 1`; blocks that all rows see whole need no mask. With a
    # window every block is masked, from the first key that the first row sees on.
    before = length - (end - begin)
    limit = before + token + 1
    last = tl.where(first < end - begin, before + tl.minimum(first + BLOCK_Q, end - begin), 0)
    whole = tl.minimum(tl.maximum(before + first + 1, 0), tl.maximum(last, 0)) // BLOCK_N * BLOCK_N
    if WINDOWED:
        whole = tl.maximum(before + first + 1 - window, 0)
    table_ptr += tl.where(real, sequence, 0) * stride_ts
    k_ptr += kv_head * stride_kh
    v_ptr += kv_head * stride_vh
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for MASKED in tl.static_range(1 if WINDOWED else 0, 2):
        if BY_WHILE:
            start = 0 if MASKED == 0 else whole
            stop = whole if MASKED == 0 else last
            while start < stop:
                maximum, total, acc = _prefill_block(
                    q, k_ptr, v_ptr, table_ptr, start, last, limit, window, dim, maximum, total, acc, scale_log2,
                    cap_log2, stride_te, stride_kp, stride_kr, stride_kd, stride_vp, stride_vr, stride_vd,
                    MASKED, HEAD_DIM, PAGE, BLOCK_D, BLOCK_N, WINDOWED, CAPPED, FP8, PARTS, SHIFT,
                )  # fmt: skip
                start += BLOCK_N
        else:
            for start in tl.range(0 if MASKED == 0 else whole, whole if MASKED == 0 else last, BLOCK_N):
                maximum, total, acc = _prefill_block(
                    q, k_ptr, v_ptr, table_ptr, start, last, limit, window, dim, maximum, total, acc, scale_log2,
                    cap_log2, stride_te, stride_kp, stride_kr, stride_kd, stride_vp, stride_vr, stride_vd,
                    MASKED, HEAD_DIM, PAGE, BLOCK_D, BLOCK_N, WINDOWED, CAPPED, FP8, PARTS, SHIFT,
                )  # fmt: skip
    found = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a row without keys has accumulated exactly 0
    target = out_ptr + (at * stride_ot + head * stride_oh)[:, None] + dim[None, :] * stride_od
    tl.store(target, found.to(out_ptr.dtype.element_ty), mask=used)


@triton.jit
def _prefill_block(
    q, k_ptr, v_ptr, table_ptr, start, last, limit, window, dim, maximum, total, acc, scale_log2, cap_log2,
    stride_te, stride_kp, stride_kr, stride_kd, stride_vp, stride_vr, stride_vd,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, FP8: tl.constexpr, PARTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    positions = start + tl.arange(0, BLOCK_N)
    inside = positions < last
    page, row = block_rows(table_ptr, positions, inside, stride_te, PAGE)
    k_at = k_ptr + (page * stride_kp + row * stride_kr)[:, None] + dim[None, :] * stride_kd
    v_at = v_ptr + (page * stride_vp + row * stride_vr)[:, None] + dim[None, :] * stride_vd
    if MASKED:
        used = inside[:, None] & (dim < HEAD_DIM)[None, :]
    else:
        used = (dim < HEAD_DIM)[None, :] & (positions >= 0)[:, None]
    k = tl.load(k_at, mask=used, other=0)
    v = tl.load(v_at, mask=used, other=0)
    if FP8:
        k = decode_e4m3(k).to(q.dtype)
        v = decode_e4m3(v).to(q.dtype)
        if PARTS > 0:
            k = settled(k)
            v = settled(v)
    visible = positions[None, :] < limit[:, None]
    if WINDOWED:
        visible = visible & (positions[None, :] >= (limit - window)[:, None])
    return attend_block(q, k, v, visible, maximum, total, acc, scale_log2, cap_log2, MASKED, CAPPED, PARTS, SHIFT)


def _launch(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    out: torch.Tensor,
) -> None:
    tokens, heads, head_dim = query.shape
    page_size, kv_heads = k_cache.shape[1:3]
    group, sequences = heads // kv_heads, seq_lens.shape[0]
    if query.numel() == 0:
        return
    rows = next_power_of_2(min(tokens // max(sequences, 1), 128) * group)
    meta = resolve_tiles(
        _OP, query.device, head_dim=head_dim, group=group, itemsize=query.element_size(), rows=min(rows, 128)
    )
    members = min(group, meta["BLOCK_M"])
    block_q = meta["BLOCK_M"] // members
    grid = (tokens // block_q + sequences + 1, kv_heads * -(-group // members))
    factor, cap = (scale / softcap, softcap * LOG2_E) if softcap else (scale * LOG2_E, 0.0)
    max_keys = block_table.shape[1] * page_size
    window = min(window, max_keys)
    launch(
        _prefill, grid, query.device,
        query, as_bytes(k_cache), as_bytes(v_cache), cu_seqlens_q, seq_lens, block_table, out, factor, cap,
        tokens, sequences, max_keys, window,
        *query.stride(), *k_cache.stride(), *v_cache.stride(), *cu_seqlens_q.stride(), *seq_lens.stride(),
        *block_table.stride(), *out.stride(),
        GROUP=group, HEAD_DIM=head_dim, PAGE=page_size, MEMBERS=members, BLOCK_Q=block_q,
        WINDOWED=window > 0, CAPPED=cap > 0, FP8=k_cache.dtype is E4M3,
        BY_WHILE=loops_by_while(), **probability_parts(query.dtype), **meta,
    )  # fmt: skip
