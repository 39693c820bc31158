"""`sample` in Triton: two launches, no sort, no host look at a value.

`_survey` reads the logits once, in chunks of CHUNK, by as many programs as there are: each chunk's maximum, its lowest
id, and its mass relative to that maximum. `_choose` gives one program to each row. A greedy row, or one that has only a
temperature, is settled from the chunks: the latter draws a chunk, then a token in it. A row with filters first derives
a floor under every token that can survive them, gathers the tokens above it in vocabulary order, and finds each
filter's exact threshold among these by bisection over the order of the floats, snapping to values that occur:

- top_k: the k-th largest chunk maximum has at least k tokens at or above it;
- top_p: tokens below max + temperature * log((1 - top_p) * mass / vocab) cannot hold the mass that top_p leaves out;
- min_p: max + temperature * log(min_p).

Where more tokens are above the floor than the workspace holds, the same search runs over the whole row. All sums have a
fixed order, so equal arguments give equal tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles
from rapid_llm.kernels.ops.triton_support import launch, tl, triton

CHUNK: Final = 256
"""Tokens per surveyed chunk: fine enough that top_k up to vocab / CHUNK finds a floor."""

_LARGEST = tl.constexpr(0x7FFFFFFF)
_SMALLEST = tl.constexpr(-0x80000000)


def candidate_capacity(vocab: int) -> int:
    """Tokens per row that the workspace holds, of 8 bytes each: beyond them a search over the row costs no more."""
    return max(2048, vocab // 8)


@tiles("sample")
def _tiles(sm: int, *, vocab: int) -> Mapping[str, int]:
    # One program owns a row in `choose`, so it takes all the threads that a program can have.
    block = max(CHUNK, min(8192, next_power_of_2(vocab)))
    return {"BLOCK": block, "num_warps": max(1, min(32, block // 256))}


@triton.jit
def _load(ptr, offsets, mask):
    """fp32 logits; -0.0 becomes 0.0, so that equal values have equal keys."""
    x = tl.load(ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def _key(x):
    """int32 in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(x, top, temperature):
    """Probability relative to the most probable token; 0 for -inf."""
    return tl.exp((x - top) / temperature)


@triton.jit(do_not_specialize=["chunks", "stride_t"])
def _survey(
    logits_ptr, temperature_ptr, floats_ptr, ints_ptr, vocab, chunks, stride_row, stride_col, stride_t,
    CHUNK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    spans = tl.cdiv(chunks, COUNT)
    row = (tl.program_id(0) // spans).to(tl.int64)
    chunk = (tl.program_id(0) % spans) * COUNT + tl.arange(0, COUNT)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = _load(logits_ptr + row * stride_row, token.to(tl.int64) * stride_col, token < vocab)
    x = tl.where(x != x, float("inf"), x)  # from here on +inf says that the row is unusable
    top = tl.max(x, 1)
    first = tl.min(tl.where(x == top[:, None], token, _LARGEST), 1)
    temperature = tl.load(temperature_ptr + row * stride_t)
    usable = (top < float("inf")) & (top > float("-inf"))
    base = tl.where(usable, top, 0.0)
    mass = tl.sum(_weight(x, base[:, None], tl.where(temperature > 0.0, temperature, 1.0)), 1)
    at = row * chunks + chunk
    rows = (tl.num_programs(0) // spans).to(tl.int64)
    tl.store(floats_ptr + at, top, mask=chunk < chunks)
    tl.store(floats_ptr + rows * chunks + at, tl.where(usable, mass, 0.0), mask=chunk < chunks)
    tl.store(ints_ptr + at, first, mask=chunk < chunks)


@triton.jit
def _candidates(values_ptr, logits_ptr, start, count, whole, stride_col, BLOCK: tl.constexpr):
    """(position, value, is one) of a block of candidates: gathered ones, or the whole row."""
    at = start + tl.arange(0, BLOCK)
    inside = at < count
    gathered = tl.load(values_ptr + at, mask=inside & (whole == 0), other=float("-inf"))
    direct = _load(logits_ptr, at.to(tl.int64) * stride_col, inside & (whole != 0))
    x = tl.maximum(gathered, direct)
    return at, x, inside & (x > float("-inf"))


@triton.jit
def _sum_from(
    values_ptr, logits_ptr, count, whole, stride_col, top, temperature, floor, pivot, COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the candidates from the key floor on: the sum of the weights (or the number) of those from pivot on, the least
    key of these, and the greatest key below pivot."""
    total = tl.zeros((), tl.float32)
    least = tl.full((), _LARGEST, tl.int32)
    greatest = tl.full((), _SMALLEST, tl.int32)
    start = count * 0
    while start < count:
        _, x, valid = _candidates(values_ptr, logits_ptr, start, count, whole, stride_col, BLOCK)
        key = _key(x)
        valid = valid & (key >= floor)
        above = valid & (key >= pivot)
        if COUNTED:
            total += tl.sum(above.to(tl.int32), 0).to(tl.float32)
        else:
            total += tl.sum(tl.where(above, _weight(x, top, temperature), 0.0), 0)
        least = tl.minimum(least, tl.min(tl.where(above, key, _LARGEST), 0))
        greatest = tl.maximum(greatest, tl.max(tl.where(valid & (key < pivot), key, _SMALLEST), 0))
        start += BLOCK
    return total, least, greatest


@triton.jit
def _search(
    values_ptr, logits_ptr, count, whole, stride_col, top, temperature, floor, active, target, COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The greatest key from which on the candidates' weights (or number) reach target; floor where none is greater."""
    low = floor
    high = tl.where(active, _key(top), floor)
    while low < high:
        middle = (low.to(tl.int64) + (high.to(tl.int64) - low.to(tl.int64) + 1) // 2).to(tl.int32)
        total, least, greatest = _sum_from(
            values_ptr, logits_ptr, count, whole, stride_col, top, temperature, floor, middle, COUNTED, BLOCK
        )
        reached = total >= target
        low = tl.where(reached, least, low)
        high = tl.where(reached, high, greatest)
    return low


@triton.jit
def _floor(tops, mass, top, temperature, top_k, top_p, min_p, vocab):
    """A value that every token surviving the filters reaches; -inf where there is none to be had."""
    by_count = (top_k > 0) & (top_k < vocab)
    low = _key(tl.full((), float("-inf"), tl.float32))
    high = tl.where(by_count, _key(top), low)  # with fewer chunks than top_k none is reached, and -inf remains
    keys = _key(tops)
    while low < high:
        middle = (low.to(tl.int64) + (high.to(tl.int64) - low.to(tl.int64) + 1) // 2).to(tl.int32)
        reached = tl.sum((keys >= middle).to(tl.int32), 0) >= top_k
        low = tl.where(reached, tl.min(tl.where(keys >= middle, keys, _LARGEST), 0), low)
        high = tl.where(reached, high, tl.max(tl.where(keys < middle, keys, _SMALLEST), 0))
    bits = low ^ ((low >> 31) & 0x7FFFFFFF)
    kth = bits.to(tl.float32, bitcast=True)
    left = tl.where(top_p < 1.0, (1.0 - top_p) * mass / vocab * 0.5, min_p)
    reach = temperature * tl.log(left)
    slack = (tl.abs(top) + tl.abs(reach)) * 4.8e-7  # 4 ulp: rounding here must not lift the floor over a token
    return tl.where(by_count, kth, top + reach - slack)


@triton.jit
def _gather(
    logits_ptr, tops_ptr, values_ptr, ids_ptr, begin, end, floor, capacity, stride_col, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the tokens of [begin, end) that reach floor, in order; returns how many there are, stored or not."""
    count = begin * 0
    start = begin
    while start < end:
        token = start + tl.arange(0, BLOCK)
        reach = tl.load(tops_ptr + token // CHUNK, mask=token < end, other=float("-inf")) >= floor
        x = _load(logits_ptr, token.to(tl.int64) * stride_col, (token < end) & reach)
        kept = (x >= floor) & (x > float("-inf"))
        at = count + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(values_ptr + at, x, mask=kept & (at < capacity))
        tl.store(ids_ptr + at, token, mask=kept & (at < capacity))
        count += tl.sum(kept.to(tl.int32), 0)
        start += BLOCK
    return count


@triton.jit
def _draw(
    values_ptr, ids_ptr, logits_ptr, count, whole, stride_col, top, temperature, threshold, min_p, before, target,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first id whose running mass, from `before` on, exceeds target; the last with mass if rounding hides it."""
    drawn = tl.full((), -1, tl.int32)
    last = tl.full((), -1, tl.int32)
    running = before
    start = count * 0
    while (start < count) & (drawn < 0):
        at, x, valid = _candidates(values_ptr, logits_ptr, start, count, whole, stride_col, BLOCK)
        ids = tl.load(ids_ptr + at, mask=(at < count) & (whole == 0), other=-1)
        ids = tl.where(whole != 0, at, ids)
        weight = _weight(x, top, temperature)
        weight = tl.where(valid & (_key(x) >= threshold) & (weight >= min_p), weight, 0.0)
        exceeds = (running + tl.cumsum(weight, 0) > target) & (weight > 0.0)
        first = tl.min(tl.where(exceeds, ids, _LARGEST), 0)
        drawn = tl.where(first < _LARGEST, first, drawn)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, ids, -1), 0))
        running += tl.sum(weight, 0)
        start += BLOCK
    return tl.where(drawn < 0, last, drawn)


@triton.jit
def _kept_mass(
    values_ptr, logits_ptr, count, whole, stride_col, top, temperature, threshold, min_p, BLOCK: tl.constexpr
):
    total = tl.zeros((), tl.float32)
    start = count * 0
    while start < count:
        _, x, valid = _candidates(values_ptr, logits_ptr, start, count, whole, stride_col, BLOCK)
        weight = _weight(x, top, temperature)
        total += tl.sum(tl.where(valid & (_key(x) >= threshold) & (weight >= min_p), weight, 0.0), 0)
        start += BLOCK
    return total


@triton.jit(do_not_specialize=["chunks", "capacity", "st", "sk", "sp", "sm", "su", "so"])
def _choose(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, uniform_ptr, out_ptr, floats_ptr, ints_ptr,
    vocab, chunks, capacity, stride_row, stride_col, st, sk, sp, sm, su, so,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0).to(tl.int64)
    logits_ptr += row * stride_row
    tops_ptr = floats_ptr + row * chunks
    values_ptr = floats_ptr + 2 * rows * chunks + row * capacity
    ids_ptr = ints_ptr + rows * chunks + row * capacity
    chunk = tl.arange(0, CHUNKS)
    tops = tl.load(tops_ptr + chunk, mask=chunk < chunks, other=float("-inf"))
    top = tl.max(tops, 0)
    firsts = tl.load(ints_ptr + row * chunks + chunk, mask=chunk < chunks, other=_LARGEST)
    greedy = tl.min(tl.where(tops == top, firsts, _LARGEST), 0)

    temperature = tl.load(temperature_ptr + row * st)
    top_k = tl.load(top_k_ptr + row * sk).to(tl.int32)
    top_p = tl.load(top_p_ptr + row * sp)
    min_p = tl.minimum(tl.load(min_p_ptr + row * sm), 1.0)
    uniform = tl.load(uniform_ptr + row * su)
    usable = (top > float("-inf")) & (top < float("inf"))
    random = usable & (temperature > 0.0)
    temperature = tl.where(random, temperature, 1.0)
    top = tl.where(usable, top, 0.0)

    masses = tl.load(floats_ptr + rows * chunks + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    masses = masses * _weight(tops, top, temperature)
    masses = tl.where(random, masses, 0.0)
    mass = tl.sum(masses, 0)
    by_count = (top_k > 0) & (top_k < vocab)
    filtered = by_count | (top_p < 1.0) | (min_p > 0.0)

    # Without filters the chunk is drawn first, and its tokens are the candidates.
    beyond = (tl.cumsum(masses, 0) > uniform * mass) & (masses > 0.0)
    drawn = tl.min(tl.where(beyond, chunk, _LARGEST), 0)
    drawn = tl.where(drawn < _LARGEST, drawn, tl.max(tl.where(masses > 0.0, chunk, 0), 0))
    before = tl.where(filtered, 0.0, tl.sum(tl.where(chunk < drawn, masses, 0.0), 0))
    floor = _floor(tops, mass, top, temperature, top_k, top_p, min_p, vocab)
    floor = tl.where(filtered, floor, float("-inf"))
    begin = tl.where(filtered, 0, drawn * CHUNK)
    end = tl.where(random, tl.where(filtered, vocab, tl.minimum(begin + CHUNK, vocab)), begin)

    count = _gather(logits_ptr, tops_ptr, values_ptr, ids_ptr, begin, end, floor, capacity, stride_col, CHUNK, BLOCK)
    tl.debug_barrier()  # the gathered tokens are read by other threads than stored them
    whole = (count > capacity).to(tl.int32)
    count = tl.where(whole != 0, vocab, count)
    threshold = _key(floor)
    threshold = _search(
        values_ptr, logits_ptr, count, whole, stride_col, top, temperature, threshold, random & by_count,
        top_k.to(tl.float32), True, BLOCK,
    )  # fmt: skip
    among, _, _ = _sum_from(
        values_ptr, logits_ptr, tl.where(by_count, count, 0), whole, stride_col, top, temperature, threshold, threshold,
        False, BLOCK,
    )  # fmt: skip
    threshold = _search(
        values_ptr, logits_ptr, count, whole, stride_col, top, temperature, threshold, random & (top_p < 1.0),
        top_p * tl.where(by_count, among, mass), False, BLOCK,
    )  # fmt: skip
    kept = _kept_mass(
        values_ptr,
        logits_ptr,
        tl.where(filtered, count, 0),
        whole,
        stride_col,
        top,
        temperature,
        threshold,
        min_p,
        BLOCK,
    )
    target = uniform * tl.where(filtered, kept, mass)
    token = _draw(
        values_ptr,
        ids_ptr,
        logits_ptr,
        count,
        whole,
        stride_col,
        top,
        temperature,
        threshold,
        min_p,
        before,
        target,
        BLOCK,
    )
    token = tl.where(random, token, tl.where(usable, greedy, -1))
    tl.store(out_ptr + row * so, token.to(tl.int64))


def launch_sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Both launches; the arguments are checked, vocab is not 0."""
    rows, vocab = logits.shape
    device = logits.device
    chunks = -(-vocab // CHUNK)
    capacity = candidate_capacity(vocab)
    floats = torch.empty(rows * (2 * chunks + capacity), dtype=torch.float32, device=device)
    ints = torch.empty(rows * (chunks + capacity), dtype=torch.int32, device=device)
    stride_row, stride_col = logits.stride()
    meta = resolve_tiles("sample", device, vocab=vocab)
    launch(
        _survey, (rows * -(-chunks // 8),), device,
        logits, temperature, floats, ints, vocab, chunks, stride_row, stride_col, *temperature.stride(),
        CHUNK=CHUNK, COUNT=8, num_warps=4,
    )  # fmt: skip
    launch(
        _choose, (rows,), device,
        logits, temperature, top_k, top_p, min_p, uniform, out, floats, ints,
        vocab, chunks, capacity, stride_row, stride_col, *temperature.stride(), *top_k.stride(), *top_p.stride(),
        *min_p.stride(), *uniform.stride(), *out.stride(),
        CHUNK=CHUNK, CHUNKS=next_power_of_2(chunks), **meta,
    )  # fmt: skip
