"""comm.dispatch and comm.combine in float64: what every rank should hold, bounds, and the work of a call.

`dispatched` and `combined` speak of all ranks at once, for tests with several; the ops' oracles are their case of one
rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapid_llm.verify.oracles import _reference
from rapid_llm.verify.rounding import finish, gamma
from rapid_llm.verify.work import Work, unique_bytes

Rank = dict[str, Any]
"""One rank's arguments by name."""


def dispatched(ranks: list[Rank], num_experts: int) -> list[tuple[Tensor, ...]]:
    """For each rank the expected contents of recv, recv_ids, recv_weights and recv_source."""
    local = num_experts // len(ranks)
    results = []
    for here, mine in enumerate(ranks):
        recv, ids, weights, source = (mine[n].to(torch.float64).clone() for n in _MUTATED)
        ids.fill_(-1.0)
        weights.fill_(0.0)
        source.fill_(-1.0)
        row = 0
        for origin, other in enumerate(ranks):
            for token, chosen in enumerate(other["topk_ids"].tolist()):
                if not any(here * local <= e < (here + 1) * local for e in chosen):
                    continue
                recv[row] = other["input"][token].to(torch.float64)
                source[row, 0], source[row, 1] = origin, token
                for k, expert in enumerate(chosen):
                    if here * local <= expert < (here + 1) * local:
                        ids[row, k] = expert - here * local
                        weights[row, k] = other["topk_weights"][token, k].to(torch.float64)
                row += 1
        results.append((recv, ids, weights, source))
    return results


_MUTATED = ("recv", "recv_ids", "recv_weights", "recv_source")


def combined(ranks: list[Rank]) -> list[Tensor]:
    """For each rank the sums of the rows that come back to its tokens."""
    sums = [torch.zeros(r["tokens"], r["input"].shape[1], dtype=torch.float64) for r in ranks]
    for rank in ranks:
        for row, (origin, token) in enumerate(rank["recv_source"].tolist()):
            if origin >= 0:
                sums[origin][token] += rank["input"][row].to(torch.float64)
    return sums


def combined_bound(ranks: list[Rank], expected: list[Tensor]) -> list[Tensor]:
    """gamma(ranks - 1) times the magnitudes added, and the store; nothing where a single row comes back."""
    magnitudes = combined([{**r, "input": r["input"].to(torch.float64).abs()} for r in ranks])
    slack = [gamma(len(ranks) - 1) * m for m in magnitudes]
    dtype = ranks[0]["input"].dtype
    return [finish(e, s, dtype) for e, s in zip(expected, slack, strict=True)]


@_reference
def comm_dispatch(*, num_experts: int, ranks: int = 1, group: str = "", **tensors: Tensor) -> tuple[Tensor, ...]:
    """The new contents of recv, recv_ids, recv_weights and recv_source of the only rank."""
    _alone(ranks, group)
    return dispatched([tensors], num_experts)[0]


@_reference
def comm_combine(*, input: Tensor, recv_source: Tensor, tokens: int, ranks: int = 1, group: str = "") -> Tensor:
    """Each token's row back in its place, zeros for a token that has none."""
    _alone(ranks, group)
    return combined([{"input": input, "recv_source": recv_source, "tokens": tokens}])[0]


def _alone(ranks: int, group: str) -> None:
    if ranks != 1:
        raise ValueError(f"this oracle is of one rank, not {ranks} of group {group!r}; `dispatched` has several")


def comm_dispatch_bound(
    args: Rank, expected: tuple[Tensor, ...], roundings: tuple[str, ...] = ()
) -> tuple[Tensor, ...]:
    """Copies are exact."""
    del args, roundings
    return tuple(torch.zeros_like(e) for e in expected)


def comm_combine_bound(args: Rank, expected: Tensor, roundings: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """One row comes back to a token at most: a copy, exact."""
    del args, roundings
    return (torch.zeros_like(expected),)


def comm_dispatch_work(
    *,
    input: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    recv: Tensor,
    recv_ids: Tensor,
    recv_weights: Tensor,
    recv_source: Tensor,
    num_experts: int,
    ranks: int = 1,
    group: str = "",
) -> Work:
    """The tokens that have an expert, read once and written once for each rank that they go to."""
    del recv, group
    owner = topk_ids.div(num_experts // ranks, rounding_mode="floor")
    copies = sum(int((owner == r).any(1).sum()) for r in range(ranks))
    kept = int((topk_ids >= 0).any(1).sum())
    row = input.shape[1] * input.element_size()
    table = sum(unique_bytes(t) for t in (recv_ids, recv_weights, recv_source))
    return Work(kept * row + unique_bytes(topk_ids) + unique_bytes(topk_weights), copies * row + table, 0)


def comm_combine_work(*, input: Tensor, recv_source: Tensor, tokens: int, ranks: int = 1, group: str = "") -> Work:
    """Every row that has a source once, every token once; an addition for each element but the first of a token."""
    del ranks, group
    rows = int((recv_source[:, 0] >= 0).sum())
    width, size = input.shape[1], input.element_size()
    return Work(rows * width * size + unique_bytes(recv_source), tokens * width * size, max(rows - tokens, 0) * width)
