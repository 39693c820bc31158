"""Native `comm.dispatch` and `comm.combine`: torch.distributed's all-to-all; within one rank, row copies alone.

Rows travel as bytes, so that every dtype does, and with them the token, its experts and their weights. Within one rank
no count is read on the host; between ranks the counts are, and travel first.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.arguments import check_disjoint, check_tensor, check_written
from rapid_llm.kernels.ops.moe.groups import check_combine, check_dispatch, process_group
from rapid_llm.kernels.registry import ArgumentError

_DISPATCH: Final = "comm.dispatch"
_COMBINE: Final = "comm.combine"


def comm_dispatch(
    input: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    recv: Tensor,
    recv_ids: Tensor,
    recv_weights: Tensor,
    recv_source: Tensor,
    *,
    num_experts: int,
    ranks: int = 1,
    group: str = "",
) -> None:
    """Tokens to the ranks of their experts. See `rapid_llm.kernels.comm_dispatch`."""
    check_dispatch(input, topk_ids, topk_weights, recv, recv_ids, recv_weights, recv_source, num_experts, ranks)
    into = (recv, recv_ids, recv_weights, recv_source)
    if ranks == 1:
        _within(input, topk_ids, topk_weights, *into)
        return
    found, rank = process_group(_DISPATCH, ranks, group)
    local = num_experts // ranks
    owner = topk_ids.div(local, rounding_mode="floor")  # negative for a negative expert
    goes = (owner.unsqueeze(2) == torch.arange(ranks, device=owner.device)).any(1)
    to, token = goes.t().nonzero(as_tuple=True)
    mine = owner[token] == to[:, None]
    ids = torch.where(mine, topk_ids[token] - to[:, None] * local, -1).to(topk_ids.dtype)
    weights = torch.where(mine, topk_weights[token], 0.0)
    counts, expected = _agree(goes.sum(0), recv.shape[0], rank, found)
    rows = sum(expected)
    recv[:rows] = _travel(input[token], counts, expected, found)
    recv_ids[:rows] = _travel(ids, counts, expected, found)
    recv_weights[:rows] = _travel(weights, counts, expected, found)
    recv_source[:rows, 1] = _travel(token.to(torch.int32).unsqueeze(1), counts, expected, found).squeeze(1)
    recv_source[:rows, 0] = _ranks_of(expected, recv.device)
    for tensor, nothing in ((recv_ids, -1), (recv_weights, 0), (recv_source, -1)):
        tensor[rows:] = nothing


def comm_combine(
    input: Tensor,
    recv_source: Tensor,
    tokens: int,
    out: Tensor | None = None,
    *,
    ranks: int = 1,
    group: str = "",
) -> Tensor:
    """Rows back to their tokens, and their sums. See `rapid_llm.kernels.comm_combine`."""
    check_combine(input, recv_source, tokens, ranks)
    shape = (tokens, input.shape[1])
    if out is None:
        result = torch.empty(shape, dtype=input.dtype, device=input.device)
    else:
        check_tensor(_COMBINE, "out", out, input, shape)
        check_written(_COMBINE, "out", out)
        check_disjoint(_COMBINE, "out", out, "input", input)
        result = out
    if ranks == 1:
        return _return_within(input, recv_source, result)
    found, _ = process_group(_COMBINE, ranks, group)
    valid = recv_source[:, 0] >= 0
    row = valid.nonzero().squeeze(1)
    row = row[torch.argsort(recv_source[row, 0], stable=True)]
    sent = torch.bincount(recv_source[row, 0], minlength=ranks)
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=found)
    counts, expected = sent.tolist(), received.tolist()
    rows = _travel(input[row], counts, expected, found)
    token = _travel(recv_source[row, 1:2], counts, expected, found).squeeze(1).to(torch.int64)
    total = torch.zeros(shape, dtype=torch.float32, device=input.device)
    for part, place in zip(rows.split(expected), token.split(expected), strict=True):
        total[place] += part.float()  # a token comes back once from a rank
    return result.copy_(total)


def _within(
    input: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    recv: Tensor,
    recv_ids: Tensor,
    recv_weights: Tensor,
    recv_source: Tensor,
) -> None:
    """One rank has every expert: the tokens that chose any move up, the others are left out."""
    tokens, capacity = input.shape[0], recv.shape[0]
    if capacity < tokens:
        raise ArgumentError(
            f"{_DISPATCH}: up to {tokens} rows arrive, more than recv's {capacity}; give it a capacity of {tokens}"
        )
    kept = (topk_ids >= 0).any(1)
    first = torch.argsort(~kept, stable=True)  # the rows that are kept, in order, then the others
    alive = torch.arange(tokens, device=input.device) < kept.sum()
    recv[:tokens] = torch.where(alive[:, None], input[first], recv[:tokens])
    chosen = topk_ids[first]
    some = alive[:, None] & (chosen >= 0)
    recv_ids[:tokens] = torch.where(some, chosen, -1)
    recv_weights[:tokens] = torch.where(some, topk_weights[first], 0.0)
    recv_source[:tokens, 0] = torch.where(alive, 0, -1).to(torch.int32)
    recv_source[:tokens, 1] = torch.where(alive, first, -1).to(torch.int32)
    for tensor, nothing in ((recv_ids, -1), (recv_weights, 0), (recv_source, -1)):
        tensor[tokens:] = nothing


def _return_within(input: Tensor, recv_source: Tensor, result: Tensor) -> Tensor:
    """One row at most comes back to each token; the rows of none go to a place behind the last token."""
    tokens = result.shape[0]
    place = torch.where(recv_source[:, 0] >= 0, recv_source[:, 1].to(torch.int64), tokens)
    total = torch.zeros(tokens + 1, input.shape[1], dtype=input.dtype, device=input.device)
    total[place] = input
    return result.copy_(total[:tokens])


def _agree(sent: Tensor, capacity: int, rank: int, group: Any) -> tuple[list[int], list[int]]:
    """(rows to each rank, rows from each). Where some rank lacks capacity every rank raises, and none waits."""
    mine = torch.cat((sent, sent.new_tensor([capacity])))
    every = [torch.empty_like(mine) for _ in range(sent.numel())]
    torch.distributed.all_gather(every, mine, group=group)
    table = torch.stack(every).tolist()
    for other, room in enumerate(row[-1] for row in table):
        arriving = sum(row[other] for row in table)
        if arriving > room:
            raise ArgumentError(
                f"{_DISPATCH}: {arriving} rows arrive at rank {other}, more than its recv has, {room}; a capacity of "
                "ranks * the most tokens of a rank always suffices"
            )
    return table[rank][:-1], [row[rank] for row in table]


def _travel(rows: Tensor, counts: list[int], expected: list[int], group: Any) -> Tensor:
    """counts[r] rows to each rank r, in order; expected[r] rows from each."""
    packed = rows.contiguous().view(torch.uint8)
    arrived = packed.new_empty(sum(expected), packed.shape[1])
    torch.distributed.all_to_all_single(arrived, packed, expected, counts, group=group)
    return arrived.view(rows.dtype)


def _ranks_of(expected: list[int], device: torch.device) -> Tensor:
    """The source rank of each row, from the number of rows of each rank."""
    counts = torch.tensor(expected, device=device)
    return torch.arange(len(expected), dtype=torch.int32, device=device).repeat_interleave(counts)
