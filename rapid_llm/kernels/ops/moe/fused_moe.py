"""Native `fused_moe`: grouped GEMMs over tokens sorted by expert, in Triton on CUDA; one expert after the other on CPU.

On CUDA nothing is read on the host and every grid follows from shapes alone, so that a graph may capture it. Two
kernels count each expert's choices (a token and one of its k experts) and sort them by expert, in the order of tokens.
A program of a GEMM finds its expert, and its place among that expert's choices, from the counts; the grid has room for
the most blocks that any routing can need. The results of all choices are kept in fp32 and added up in order of k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from rapid_llm.kernels.ops.arguments import check_disjoint, check_kind, check_tensor, check_written, token_strides
from rapid_llm.kernels.ops.gemm.precision import exact_linear
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles
from rapid_llm.kernels.ops.triton_support import attempt, launch, tl, triton, use_triton
from rapid_llm.kernels.registry import ArgumentError

_OP: Final = "fused_moe"
_CHUNK: Final = 1024
"""Choices that a program of the sort looks at at once."""

_WORKSPACE: Final = 1 << 27
"""Elements of one intermediate result; more tokens than fit are done in turns."""


def fused_moe(
    input: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor, out: Tensor | None = None
) -> Tensor:
    """The weighted sum of each token's experts. See `rapid_llm.kernels.fused_moe`."""
    _check(input, gate_up, down, topk_weights, topk_ids)
    if out is not None:
        check_tensor(_OP, "out", out, input, input.shape)
        check_written(_OP, "out", out)
        named = (("gate_up", gate_up), ("down", down), ("topk_weights", topk_weights), ("topk_ids", topk_ids))
        for name, tensor in (("input", input), *named):
            check_disjoint(_OP, "out", out, name, tensor)
    args = (input, gate_up, down, topk_weights, topk_ids)
    if use_triton(_OP, input):
        result = torch.empty(input.shape, dtype=input.dtype, device=input.device) if out is None else out
        if attempt(_OP, _launch, *args, result):
            return result
    total = _all_experts(*args) if input.is_cuda else _by_expert(*args)
    return total.to(input.dtype) if out is None else out.copy_(total)


def _check(input: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> None:
    """Raise `ArgumentError` for shapes, dtypes or devices that would make the result silently wrong."""
    for name, tensor in (("gate_up", gate_up), ("down", down)):
        check_kind(_OP, name, tensor, input)
    fits = input.dim() == 2 and gate_up.dim() == 3 and down.dim() == 3
    if not fits or (gate_up.shape[0], input.shape[1], gate_up.shape[1]) != (
        *(down.shape[0], down.shape[1], 2 * down.shape[2]),
    ):
        raise ArgumentError(
            f"{_OP}: input must be (tokens, hidden), gate_up (experts, 2 * intermediate, hidden) and down (experts, "
            f"hidden, intermediate), got {tuple(input.shape)}, {tuple(gate_up.shape)} and {tuple(down.shape)}"
        )
    if gate_up.shape[2] != input.shape[1]:
        raise ArgumentError(f"{_OP}: gate_up takes {gate_up.shape[2]} features, input has {input.shape[1]}")
    for name, tensor, dtypes in (
        ("topk_weights", topk_weights, (torch.float32,)),
        ("topk_ids", topk_ids, (torch.int32, torch.int64)),
    ):
        if tensor.dim() != 2 or tensor.shape[0] != input.shape[0] or tensor.dtype not in dtypes:
            raise ArgumentError(
                f"{_OP}: {name} must be ({input.shape[0]}, topk) of dtype {dtypes[0]}, got {tuple(tensor.shape)} "
                f"{tensor.dtype}"
            )
        if tensor.device != input.device:
            where = "CUDA device" if input.is_cuda else "device"
            raise ArgumentError(f"{_OP}: {name} must be on the same {where}, {input.device}: got {tensor.device}")
    if topk_weights.shape != topk_ids.shape:
        raise ArgumentError(
            f"{_OP}: topk_weights and topk_ids must have the same shape, got {tuple(topk_weights.shape)} and "
            f"{tuple(topk_ids.shape)}"
        )


def _expert(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert's layer of fp32 rows, in fp32."""
    gate, up = exact_linear(rows, gate_up.float()).chunk(2, -1)
    return exact_linear(F.silu(gate).mul_(up), down.float())


def _by_expert(input: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """(tokens, hidden) fp32: each expert that some token chose, over all its tokens at once."""
    experts, topk = gate_up.shape[0], topk_ids.shape[1]
    ids = topk_ids.reshape(-1).long()
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    order = ids.argsort(stable=True)
    factors = topk_weights.reshape(-1)
    total = torch.zeros(input.shape, dtype=torch.float32)
    begin = 0
    for expert, count in enumerate(ids.bincount(minlength=experts + 1)[:experts].tolist()):
        if count == 0:
            continue
        chosen = order[begin : begin + count]
        tokens = chosen // topk
        found = _expert(input[tokens].float(), gate_up[expert], down[expert])
        total.index_add_(0, tokens, found.mul_(factors[chosen, None]))
        begin += count
    return total


def _all_experts(input: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Without Triton and without a look at the ids: every expert over every token, of which most is thrown away."""
    total = torch.zeros(input.shape, dtype=torch.float32, device=input.device)
    rows = input.float()
    for expert in range(gate_up.shape[0]):
        chosen = topk_ids == expert
        factor = torch.where(chosen, topk_weights, 0.0).sum(1, keepdim=True)
        found = _expert(rows, gate_up[expert], down[expert]) * factor
        total += torch.where(chosen.any(1, keepdim=True), found, 0.0)
    return total


@tiles(_OP)
def _tiles(sm: int, *, rows: int, hidden: int, intermediate: int, itemsize: int) -> Mapping[str, int]:
    """rows: about how many choices an expert has, a power of two."""
    if itemsize == 4:  # no tensor cores in IEEE fp32: registers bound the tile
        return {"BM": 16 if rows <= 16 else 32, "BN": 32, "BK": 32, "num_warps": 4, "num_stages": 3}
    if rows <= 16:  # weights are read once or twice: deep pipelines of narrow tiles
        return {"BM": 16, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": 4}
    if rows <= 64:
        return {"BM": 32 if rows <= 32 else 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 4}
    return {"BM": 128, "BN": 64, "BK": 64, "num_warps": 8, "num_stages": 4}


@triton.jit(do_not_specialize=["choices", "ids_token"])
def _count_kernel(ids_ptr, counts_ptr, choices, ids_token, ids_step, TOPK: tl.constexpr, CHUNK: tl.constexpr):
    """How many choices fell on this program's expert."""
    expert = tl.program_id(0)
    found = tl.zeros((CHUNK,), tl.int32)
    start = expert * 0
    while start < choices:
        choice = start + tl.arange(0, CHUNK)
        at = (choice // TOPK).to(tl.int64) * ids_token + (choice % TOPK).to(tl.int64) * ids_step
        found += (tl.load(ids_ptr + at, mask=choice < choices, other=-1).to(tl.int32) == expert).to(tl.int32)
        start += CHUNK
    tl.store(counts_ptr + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["choices", "ids_token"])
def _sort_kernel(
    ids_ptr, counts_ptr, order_ptr, choices, ids_token, ids_step,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOPK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The choices of this program's expert, in order, behind those of all experts before it."""
    expert = tl.program_id(0)
    every = tl.arange(0, PADDED)
    place = tl.sum(tl.load(counts_ptr + every, mask=every < expert, other=0), 0)
    start = expert * 0
    while start < choices:
        choice = start + tl.arange(0, CHUNK)
        at = (choice // TOPK).to(tl.int64) * ids_token + (choice % TOPK).to(tl.int64) * ids_step
        mine = tl.load(ids_ptr + at, mask=choice < choices, other=-1).to(tl.int32) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order_ptr + place + rank - 1, choice, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)
        start += CHUNK


@triton.jit
def _find_block(counts_ptr, block, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr):
    """(expert, the place of the block's first choice in the order, how many of its rows are choices): of block number
    `block`; none of the last where there is no such block."""
    every = tl.arange(0, PADDED)
    counts = tl.load(counts_ptr + every, mask=every < EXPERTS, other=0)
    blocks = (counts + BM - 1) // BM
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum((ends <= block).to(tl.int32), 0)
    before = every < expert
    within = (block - tl.sum(tl.where(before, blocks, 0), 0)) * BM
    place = tl.sum(tl.where(before, counts, 0), 0) + within
    count = tl.sum(tl.where(every == expert, counts, 0), 0) - within
    return expert, place, tl.where(expert < EXPERTS, count, 0)


@triton.jit(do_not_specialize=["blocks"])
def _gate_up_kernel(
    x_ptr, w_ptr, h_ptr, counts_ptr, order_ptr, blocks, x_token, x_step, w_expert, w_row, w_step,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOPK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """silu(gate x) * (up x) of BM choices of one expert, BN columns; programs that share weights are neighbours."""
    pid = tl.program_id(0)
    expert, place, count = _find_block(counts_ptr, pid % blocks, EXPERTS, PADDED, BM)
    if count > 0:
        row = tl.arange(0, BM)
        real = row < count
        token = tl.load(order_ptr + place + row, mask=real, other=0) // TOPK
        x_rows = x_ptr + (token.to(tl.int64) * x_token)[:, None]
        n = (pid // blocks).to(tl.int64) * BN + tl.arange(0, BN)
        columns = (n < INTER)[None, :]
        gate_rows = w_ptr + expert.to(tl.int64) * w_expert + (n * w_row)[None, :]
        up_rows = gate_rows + tl.full((), INTER, tl.int64) * w_row
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for step in range((HIDDEN + BK - 1) // BK):
            k = (step * BK + tl.arange(0, BK)).to(tl.int64)
            inside = (k < HIDDEN)[:, None] & columns
            x = tl.load(x_rows + k[None, :] * x_step, mask=real[:, None] & (k < HIDDEN)[None, :], other=0.0)
            gate = tl.dot(x, tl.load(gate_rows + k[:, None] * w_step, mask=inside, other=0.0), gate,
                          input_precision="ieee")  # fmt: skip
            up = tl.dot(x, tl.load(up_rows + k[:, None] * w_step, mask=inside, other=0.0), up, input_precision="ieee")
        h = gate / (1.0 + tl.exp(-gate)) * up
        at = h_ptr + (place + row).to(tl.int64)[:, None] * INTER + n[None, :]
        tl.store(at, h.to(h_ptr.dtype.element_ty), mask=real[:, None] & columns)


@triton.jit(do_not_specialize=["blocks"])
def _down_kernel(
    h_ptr, w_ptr, y_ptr, counts_ptr, order_ptr, blocks, w_expert, w_row, w_step,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """down h of BM choices of one expert, BN columns, in fp32 to where the choice stands among all."""
    pid = tl.program_id(0)
    expert, place, count = _find_block(counts_ptr, pid % blocks, EXPERTS, PADDED, BM)
    if count > 0:
        row = tl.arange(0, BM)
        real = row < count
        h_rows = h_ptr + ((place + row).to(tl.int64) * INTER)[:, None]
        n = (pid // blocks).to(tl.int64) * BN + tl.arange(0, BN)
        columns = (n < HIDDEN)[None, :]
        w_rows = w_ptr + expert.to(tl.int64) * w_expert + (n * w_row)[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range((INTER + BK - 1) // BK):
            k = (step * BK + tl.arange(0, BK)).to(tl.int64)
            h = tl.load(h_rows + k[None, :], mask=real[:, None] & (k < INTER)[None, :], other=0.0)
            w = tl.load(w_rows + k[:, None] * w_step, mask=(k < INTER)[:, None] & columns, other=0.0)
            acc = tl.dot(h, w, acc, input_precision="ieee")
        choice = tl.load(order_ptr + place + row, mask=real, other=0).to(tl.int64)
        tl.store(y_ptr + choice[:, None] * HIDDEN + n[None, :], acc, mask=real[:, None] & columns)


@triton.jit(do_not_specialize=["ids_token", "weights_token"])
def _sum_kernel(
    y_ptr, weights_ptr, ids_ptr, out_ptr, weights_token, weights_step, ids_token, ids_step, out_token, out_step,
    HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's choices times their weights, added up in order."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(TOPK):
        expert = tl.load(ids_ptr + token * ids_token + j * ids_step)
        real = (expert >= 0) & (expert < EXPERTS)
        factor = tl.load(weights_ptr + token * weights_token + j * weights_step)
        y = tl.load(y_ptr + (token * TOPK + j) * HIDDEN + n, mask=(n < HIDDEN) & real, other=0.0)
        total += tl.where(real, y * factor, 0.0)
    tl.store(out_ptr + token * out_token + n * out_step, total.to(out_ptr.dtype.element_ty), mask=n < HIDDEN)


def _launch(input: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor, out: Tensor) -> None:
    tokens, hidden = input.shape
    experts, topk, inter = gate_up.shape[0], topk_ids.shape[1], down.shape[2]
    if tokens * hidden * topk * experts == 0:
        out.zero_()
        return
    chunk = max(1, _WORKSPACE // (topk * max(hidden, inter)))
    for first in range(0, tokens, chunk):
        part = slice(first, first + chunk)
        _launch_some(input[part], gate_up, down, topk_weights[part], topk_ids[part], out[part])


def _launch_some(
    input: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor, out: Tensor
) -> None:
    tokens, hidden = input.shape
    experts, topk, inter = gate_up.shape[0], topk_ids.shape[1], down.shape[2]
    choices, device = tokens * topk, input.device
    rows = next_power_of_2(-(-choices // experts))
    meta = resolve_tiles(
        _OP, device, rows=min(rows, 128), hidden=hidden, intermediate=inter, itemsize=input.element_size()
    )
    block_m, block_n = meta["BM"], meta["BN"]
    blocks = min(choices, choices // block_m + min(experts, choices))
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    order = torch.empty(choices, dtype=torch.int32, device=device)
    h = torch.empty(choices, inter, dtype=input.dtype, device=device)
    y = torch.empty(choices, hidden, dtype=torch.float32, device=device)
    ids = token_strides(topk_ids)
    size = {"EXPERTS": experts, "PADDED": next_power_of_2(experts)}
    both = {"HIDDEN": hidden, "INTER": inter, **size, **meta}
    launch(_count_kernel, (experts,), device, topk_ids, counts, choices, *ids, TOPK=topk, CHUNK=_CHUNK)
    launch(
        _sort_kernel, (experts,), device, topk_ids, counts, order, choices, *ids, **size, TOPK=topk, CHUNK=_CHUNK,
    )  # fmt: skip
    launch(
        _gate_up_kernel, (blocks * -(-inter // block_n),), device,
        input, gate_up, h, counts, order, blocks, *token_strides(input), *gate_up.stride(), TOPK=topk, **both,
    )  # fmt: skip
    launch(
        _down_kernel, (blocks * -(-hidden // block_n),), device,
        h, down, y, counts, order, blocks, *down.stride(), **both,
    )  # fmt: skip
    block = min(next_power_of_2(hidden), 1024)
    launch(
        _sum_kernel, (tokens, -(-hidden // block)), device,
        y, topk_weights, topk_ids, out, *token_strides(topk_weights), *ids, *token_strides(out),
        HIDDEN=hidden, EXPERTS=experts, TOPK=topk, BLOCK=block, num_warps=4,
    )  # fmt: skip
