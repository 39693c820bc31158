"""Native `attention.decode`: split-KV over the paged cache on CUDA, one fused attention a sequence on CPU.

On CUDA a program serves the query heads of one kv head over one split of one sequence. The number of splits comes from
the batch, the kv heads and the device alone; each sequence cuts its own length by it, on the device, so that a captured
launch stays right as sequences grow. A second kernel joins the splits in a fixed order.
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
    multiprocessors,
    probability_parts,
    sequence_heads,
)
from rapid_llm.kernels.ops.e4m3 import E4M3, as_bytes, decode_e4m3, settled
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles
from rapid_llm.kernels.ops.triton_support import attempt, launch, tl, triton, use_triton
from rapid_llm.kernels.registry import ArgumentError

_OP = "attention.decode"
_MAX_SPLITS = 128
_PROGRAMS_PER_MULTIPROCESSOR = 2


def attention_decode(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query token per sequence over its paged cache. See `rapid_llm.kernels.attention_decode`.

    On CPU a sequence longer than its block table, or a page outside the cache, is an `ArgumentError`; on CUDA keys
    beyond the table are not read.
    """
    check_attention(_OP, query, k_cache, v_cache, seq_lens, block_table)
    if window or softcap:
        check_limits(_OP, window, softcap)
    if seq_lens.shape[0] != query.shape[0]:
        raise ArgumentError(f"{_OP}: {query.shape[0]} queries, but seq_lens has {seq_lens.shape[0]} entries")
    if use_triton(_OP, query):
        result = allocate(_OP, query, out)
        limits = (int(window), float(softcap))
        if attempt(_OP, _launch, query, k_cache, v_cache, seq_lens, block_table, float(scale), *limits, result):
            return result
    if query.is_cuda:
        result = allocate(_OP, query, out)
        return _decode_on_device(query, k_cache, v_cache, seq_lens, block_table, scale, result, window, softcap)
    return _decode_on_cpu(query, k_cache, v_cache, seq_lens, block_table, scale, window, softcap, out)


def _decode_on_cpu(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    page_size = k_cache.shape[1]
    lengths = seq_lens.tolist()
    used = [-(-length // page_size) for length in lengths]
    tables = block_table[:, : max(used, default=0)].tolist()
    if len(lengths) == 1 and lengths[0] > 0 and out is None:
        start = max(lengths[0] - window, 0) if window else 0
        keys, values = sequence_heads(_OP, 0, k_cache, v_cache, block_table, tables[0], lengths[0], start)
        return _attend_one(query.unsqueeze(2), keys, values, scale, softcap).view(query.shape)
    out = allocate(_OP, query, out)
    for i, length in enumerate(lengths):
        if length <= 0:
            out[i] = 0
            continue
        start = max(length - window, 0) if window else 0
        keys, values = sequence_heads(_OP, i, k_cache, v_cache, block_table, tables[i][: used[i]], length, start)
        out[i] = _attend_one(query[i : i + 1].unsqueeze(2), keys, values, scale, softcap).squeeze(0).squeeze(1)
    return out


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """(1, heads, 1, head_dim) in query's dtype."""
    if softcap:
        nothing = torch.zeros(1, dtype=torch.bool)
        return attend_capped(query.float(), keys.float(), values.float(), nothing, scale, softcap).to(query.dtype)
    if keys.dtype == torch.float32:
        return scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True)
    # Weights of 16 bits would not be accurate enough, and of fp8 there is no product.
    found = scaled_dot_product_attention(query.float(), keys.float(), values.float(), scale=scale, enable_gqa=True)
    return found.to(query.dtype)


def _decode_on_device(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Without Triton and without a look at the lengths: every row reads as many keys as the table is wide."""
    page_size = k_cache.shape[1]
    if query.numel() == 0 or block_table.shape[1] == 0:
        return out.zero_()
    starts = torch.arange(block_table.shape[1], device=query.device) * page_size
    pages = block_table.long().masked_fill(starts >= seq_lens[:, None], 0)
    positions = torch.arange(len(starts) * page_size, device=query.device)
    hidden = positions >= seq_lens[:, None]
    if window:
        hidden |= positions < seq_lens[:, None] - window
    keys = k_cache[pages].flatten(1, 2).double().masked_fill(hidden[:, :, None, None], 0.0).transpose(1, 2)
    values = v_cache[pages].flatten(1, 2).double().masked_fill(hidden[:, :, None, None], 0.0).transpose(1, 2)
    found = attend_exactly(query.unsqueeze(2), keys, values, hidden[:, None, None, None], scale, softcap)
    return out.copy_(found.squeeze(2))


@tiles(_OP)
def _tiles(sm: int, *, head_dim: int, group: int, itemsize: int) -> Mapping[str, int]:
    block_d = max(16, next_power_of_2(head_dim))
    block_g = min(max(16, next_power_of_2(group)), 32)  # 16 rows are the least that tensor cores multiply
    block_n = min(
        64, max(16, 16 * 1024 // (block_d * itemsize))
    )  # 16 KiB each of keys and values, three times in flight
    return {"BLOCK_G": block_g, "BLOCK_D": block_d, "BLOCK_N": block_n, "num_warps": 4, "num_stages": 3}


def split_count(programs: int, units: int) -> int:
    """Splits per sequence, a power of two, so that `programs` of them fill `units` multiprocessors."""
    wanted = -(-_PROGRAMS_PER_MULTIPROCESSOR * units // max(programs, 1))
    return min(next_power_of_2(wanted), _MAX_SPLITS)


@triton.jit
def _seen(
    lens_ptr, sequence, max_keys, window, stride_lens,
    SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """(the first key that a sequence's query sees, one past the last, how many a split takes)."""
    length = tl.maximum(tl.minimum(tl.load(lens_ptr + sequence * stride_lens).to(tl.int32), max_keys), 0)
    start = length * 0
    if WINDOWED:
        start = tl.maximum(length - window, 0)
    return start, length, (tl.cdiv(length - start, SPLITS) + BLOCK_N - 1) // BLOCK_N * BLOCK_N


@triton.jit(do_not_specialize=["max_keys", "window", "stride_lens", "stride_ts", "stride_te"])
def _decode_split(
    query_ptr, k_ptr, v_ptr, lens_ptr, table_ptr, out_ptr, acc_ptr, stats_ptr, scale_log2, cap_log2, max_keys, window,
    stride_qt, stride_qh, stride_qd, stride_kp, stride_kr, stride_kh, stride_kd,
    stride_vp, stride_vr, stride_vh, stride_vd, stride_lens, stride_ts, stride_te, stride_ot, stride_oh, stride_od,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, FP8: tl.constexpr, PARTS: tl.constexpr, SHIFT: tl.constexpr,
    BY_WHILE: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    sequence = (tl.program_id(0) // (KV_HEADS * SLICES)).to(tl.int64)
    kv_head = (tl.program_id(0) // SLICES) % KV_HEADS
    split = tl.program_id(1)
    start, length, chunk = _seen(lens_ptr, sequence, max_keys, window, stride_lens, SPLITS, BLOCK_N, WINDOWED)
    first = start + split * chunk
    last = tl.minimum(first + chunk, length)

    member = (tl.program_id(0) % SLICES) * BLOCK_G + tl.arange(0, BLOCK_G)
    head = (kv_head * GROUP + member).to(tl.int64)
    dim = tl.arange(0, BLOCK_D).to(tl.int64)
    used = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    at = sequence * stride_qt + head[:, None] * stride_qh + dim[None, :] * stride_qd
    q = tl.load(query_ptr + at, mask=used, other=0.0)
    if PARTS == 0:
        q = q.to(tl.float32)

    table_ptr += sequence * stride_ts
    k_ptr += kv_head.to(tl.int64) * stride_kh
    v_ptr += kv_head.to(tl.int64) * stride_vh
    maximum = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    if BY_WHILE:
        at_key = first
        while at_key < last:
            maximum, total, acc = _decode_block(
                q, k_ptr, v_ptr, table_ptr, at_key, last, dim, maximum, total, acc, scale_log2, cap_log2, stride_te,
                stride_kp, stride_kr, stride_kd, stride_vp, stride_vr, stride_vd, HEAD_DIM, PAGE, BLOCK_N,
                CAPPED, FP8, PARTS, SHIFT,
            )  # fmt: skip
            at_key += BLOCK_N
    else:
        for at_key in tl.range(first, last, BLOCK_N):
            maximum, total, acc = _decode_block(
                q, k_ptr, v_ptr, table_ptr, at_key, last, dim, maximum, total, acc, scale_log2, cap_log2, stride_te,
                stride_kp, stride_kr, stride_kd, stride_vp, stride_vr, stride_vd, HEAD_DIM, PAGE, BLOCK_N,
                CAPPED, FP8, PARTS, SHIFT,
            )  # fmt: skip

    if SPLITS == 1:
        found = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a row without keys has accumulated exactly 0
        at = sequence * stride_ot + head[:, None] * stride_oh + dim[None, :] * stride_od
        tl.store(out_ptr + at, found.to(out_ptr.dtype.element_ty), mask=used)
    else:
        # The workspace: (rows, splits, head_dim) sums, then (2, rows, splits) maxima and totals. A split without keys
        # writes nothing; `_join_splits` knows from the length that it has none.
        row = (sequence * KV_HEADS * GROUP + head) * SPLITS + split
        rows = tl.num_programs(0).to(tl.int64) // SLICES * GROUP * SPLITS
        tl.store(acc_ptr + row[:, None] * HEAD_DIM + dim[None, :], acc, mask=used & (first < last))
        written = (member < GROUP) & (first < last)
        tl.store(stats_ptr + row, maximum, mask=written)
        tl.store(stats_ptr + rows + row, total, mask=written)


@triton.jit
def _decode_block(
    q, k_ptr, v_ptr, table_ptr, start, last, dim, maximum, total, acc, scale_log2, cap_log2, stride_te,
    stride_kp, stride_kr, stride_kd, stride_vp, stride_vr, stride_vd,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr, FP8: tl.constexpr, PARTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    positions = start + tl.arange(0, BLOCK_N)
    inside = positions < last
    page, row = block_rows(table_ptr, positions, inside, stride_te, PAGE)
    used = inside[:, None] & (dim < HEAD_DIM)[None, :]
    k = tl.load(k_ptr + (page * stride_kp + row * stride_kr)[:, None] + dim[None, :] * stride_kd, mask=used, other=0)
    v = tl.load(v_ptr + (page * stride_vp + row * stride_vr)[:, None] + dim[None, :] * stride_vd, mask=used, other=0)
    if FP8:
        k = decode_e4m3(k).to(q.dtype)
        v = decode_e4m3(v).to(q.dtype)
        if PARTS > 0:
            k = settled(k)
            v = settled(v)
    visible = inside[None, :]
    return attend_block(q, k, v, visible, maximum, total, acc, scale_log2, cap_log2, True, CAPPED, PARTS, SHIFT)


@triton.jit(do_not_specialize=["max_keys", "window", "stride_lens"])
def _join_splits(
    acc_ptr, stats_ptr, lens_ptr, out_ptr, max_keys, window, stride_lens, stride_ot, stride_oh, stride_od,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sequence, head = row // HEADS, row % HEADS
    start, length, chunk = _seen(lens_ptr, sequence, max_keys, window, stride_lens, SPLITS, BLOCK_N, WINDOWED)
    split = tl.arange(0, SPLITS)
    written = start + split * chunk < length
    rows = tl.num_programs(0).to(tl.int64) * SPLITS
    maximum = tl.load(stats_ptr + row * SPLITS + split, mask=written, other=float("-inf"))
    total = tl.load(stats_ptr + rows + row * SPLITS + split, mask=written, other=0.0)
    top = tl.max(maximum, 0)
    weight = tl.exp2(maximum - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight * total, 0)

    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    at = (row * SPLITS + split)[:, None] * HEAD_DIM + dim[None, :]
    acc = tl.load(acc_ptr + at, mask=written[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    found = tl.sum(weight[:, None] * acc, 0) / tl.where(total == 0.0, 1.0, total)
    at = sequence * stride_ot + head * stride_oh + dim.to(tl.int64) * stride_od
    tl.store(out_ptr + at, found.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def _launch(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    out: torch.Tensor,
) -> None:
    sequences, heads, head_dim = query.shape
    page_size, kv_heads = k_cache.shape[1:3]
    group, device = heads // kv_heads, query.device
    if query.numel() == 0:
        return
    meta = resolve_tiles(_OP, device, head_dim=head_dim, group=group, itemsize=query.element_size())
    programs = sequences * kv_heads * -(-group // meta["BLOCK_G"])
    splits = split_count(programs, multiprocessors(device))
    max_keys = block_table.shape[1] * page_size
    acc = stats = out  # not read where there is one split
    if splits > 1:
        acc = torch.empty(sequences * heads * splits * head_dim, dtype=torch.float32, device=device)
        stats = torch.empty(2 * sequences * heads * splits, dtype=torch.float32, device=device)
    factor, cap = (scale / softcap, softcap * LOG2_E) if softcap else (scale * LOG2_E, 0.0)
    window = min(window, max_keys)
    launch(
        _decode_split, (programs, splits), device,
        query, as_bytes(k_cache), as_bytes(v_cache), seq_lens, block_table, out, acc, stats,
        factor, cap, max_keys, window,
        *query.stride(), *k_cache.stride(), *v_cache.stride(), *seq_lens.stride(), *block_table.stride(), *out.stride(),
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, PAGE=page_size, SPLITS=splits,
        WINDOWED=window > 0, CAPPED=cap > 0, FP8=k_cache.dtype is E4M3,
        BY_WHILE=loops_by_while(), **probability_parts(query.dtype), **meta,
    )  # fmt: skip
    if splits > 1:
        block_d = min(64, meta["BLOCK_D"])
        launch(
            _join_splits, (sequences * heads, -(-head_dim // block_d)), device,
            acc, stats, seq_lens, out, max_keys, window, *seq_lens.stride(), *out.stride(),
            HEADS=heads, HEAD_DIM=head_dim, SPLITS=splits, BLOCK_N=meta["BLOCK_N"], BLOCK_D=block_d,
            WINDOWED=window > 0, num_warps=4,
        )  # fmt: skip
