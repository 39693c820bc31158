"""One rank of a group of processes that exchange tokens; run by tests, it prints `good` or fails.

python -m tests.kernels.exchange_worker RANK RANKS FILE MODE
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import distributed

from rapid_llm import kernels
from rapid_llm.kernels.registry import ArgumentError
from rapid_llm.verify.cases.exchange import routed
from rapid_llm.verify.compare import compare
from rapid_llm.verify.exchange import combined, combined_bound, dispatched

EXPERTS = 12
RECEIVED = ("recv", "recv_ids", "recv_weights", "recv_source")


def arguments(rank: int, ranks: int, dtype: torch.dtype, *, most: int = 9) -> dict[str, Any]:
    """What `rank` passes to comm.dispatch: another number of tokens on every rank, with most = 1 none but on the
    first."""
    g = torch.Generator().manual_seed(rank)
    tokens = max(most - 4 * rank, 0)
    ids, weights = routed(g, tokens, 3, EXPERTS)
    capacity = ranks * most + 2
    return {
        "input": torch.randn(tokens, 256, generator=g).to(dtype),
        "topk_ids": ids,
        "topk_weights": weights,
        "recv": torch.randn(capacity, 256, generator=g).to(dtype),
        "recv_ids": torch.full((capacity, 3), 77),
        "recv_weights": torch.full((capacity, 3), 7.0),
        "recv_source": torch.full((capacity, 2), 777, dtype=torch.int32),
    }


def check(rank: int, ranks: int, dtype: torch.dtype, dispatch: Any, combine: Any, most: int = 9) -> None:
    """Exchange there and back; every rank knows what every other has, and holds its own results against float64."""
    world = [arguments(r, ranks, dtype, most=most) for r in range(ranks)]
    expected = dispatched(world, EXPERTS)
    mine = arguments(rank, ranks, dtype, most=most)
    dispatch(**mine, num_experts=EXPERTS, ranks=ranks)
    for name, want in zip(RECEIVED, expected[rank], strict=True):
        outcome = compare(mine[name], want, torch.zeros_like(want))
        assert outcome.problem is None, f"rank {rank}: {name}: {outcome.problem}"
    back = [
        {
            "input": torch.randn(w["recv"].shape, generator=torch.Generator().manual_seed(50 + r)).to(dtype),
            "recv_source": expected[r][3].to(torch.int32),
            "tokens": w["input"].shape[0],
        }
        for r, w in enumerate(world)
    ]
    sums = combined(back)
    bounds = combined_bound(back, sums)
    for out in (None, torch.full(sums[rank].shape, float("nan"), dtype=dtype)):
        got = combine(back[rank]["input"], mine["recv_source"], back[rank]["tokens"], out, ranks=ranks)
        assert out is None or got is out
        outcome = compare(got, sums[rank], bounds[rank])
        assert outcome.problem is None, f"rank {rank}: {outcome.problem}"


def native(rank: int, ranks: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for most in (9, 1):
            check(rank, ranks, dtype, kernels.comm_dispatch, kernels.comm_combine, most)
    lacking = arguments(rank, ranks, torch.float32)
    if rank == 0:
        lacking |= {name: lacking[name][:3] for name in RECEIVED}
    with pytest.raises(ArgumentError, match="arrive at rank 0, more than its recv has, 3"):
        kernels.comm_dispatch(**lacking, num_experts=EXPERTS, ranks=ranks)


def deepep(rank: int, ranks: int) -> None:
    from rapid_llm.kernels.backend.deepep import exchange

    for _ in range(2):
        check(rank, ranks, torch.bfloat16, exchange.comm_dispatch, exchange.comm_combine)
    import deep_ep

    assert deep_ep.Buffer.made == 1, "one buffer serves a group"
    args = arguments(rank, ranks, torch.bfloat16)
    exchange.comm_dispatch(**args, num_experts=EXPERTS, ranks=ranks)
    args["recv_source"].add_(0)
    with pytest.raises(ArgumentError, match="the very recv_source"):
        exchange.comm_combine(args["recv"], args["recv_source"], args["input"].shape[0], ranks=ranks)


def main() -> None:
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=ranks)
    {"native": native, "deepep": deepep}[sys.argv[4]](rank, ranks)
    distributed.barrier()
    distributed.destroy_process_group()
    print("good")


if __name__ == "__main__":
    main()
