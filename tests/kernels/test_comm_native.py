"""`native/comm.dispatch` and `native/comm.combine`: several ranks, and what the conformance suite does not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rapid_llm import kernels
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from rapid_llm.kernels.registry import ArgumentError
from tests.kernels.exchange import run_group

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the rows have no kernel of Triton")


def test_ranks_exchange_tokens(tmp_path: Path) -> None:
    """Catches: rows in another order, a token sent once for each expert, counts or sources of the wrong rank, a rank
    without tokens that hangs, sums in 16 bits, ranks that wait for one which lacks capacity."""
    run_group(3, "native", tmp_path)


def arguments(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "input": torch.randn(3, 8),
        "topk_ids": torch.tensor([[0, 3], [-1, -1], [2, -1]]),
        "topk_weights": torch.rand(3, 2),
        "recv": torch.zeros(4, 8),
        "recv_ids": torch.zeros(4, 2, dtype=torch.int64),
        "recv_weights": torch.zeros(4, 2),
        "recv_source": torch.zeros(4, 2, dtype=torch.int32),
        "num_experts": 4,
    }
    return {**values, **changes}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_experts": 5, "ranks": 2}, "5 experts do not divide among 2 ranks"),
        ({"ranks": 2}, r"torch\.distributed, which is not initialised"),
        ({"recv": torch.zeros(4, 9)}, r"\(tokens, hidden\) and \(capacity, hidden\)"),
        ({"recv": torch.zeros(4, 8).half()}, "recv must have dtype torch.float32"),
        ({"topk_ids": torch.zeros(3, 2)}, "topk_ids must be"),
        ({"topk_weights": torch.rand(3, 2).double()}, "topk_weights must be"),
        ({"recv_ids": torch.zeros(4, 2, dtype=torch.int32)}, "recv_ids must be"),
        ({"recv_source": torch.zeros(4, 3, dtype=torch.int32)}, "recv_source must be"),
        (
            {
                "recv": torch.zeros(2, 8),
                "recv_ids": torch.zeros(2, 2, dtype=torch.int64),
                "recv_weights": torch.zeros(2, 2),
                "recv_source": torch.zeros(2, 2, dtype=torch.int32),
            },
            "give it a capacity of 3",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], text: str) -> None:
    """Catches: rows written behind recv, experts of no rank, ids cast in silence, a wait for ranks that are not
    there."""
    with pytest.raises(ArgumentError, match=text):
        kernels.comm_dispatch(**arguments(**changes))


def test_there_and_back() -> None:
    """Catches: a source that combine does not follow; with one rank the way back undoes the way there."""
    args = arguments()
    kernels.comm_dispatch(**args)
    back = kernels.comm_combine(args["recv"], args["recv_source"], 3)
    assert torch.equal(back, args["input"] * torch.tensor([[1.0], [0.0], [1.0]]))


def test_combine_refuses_what_does_not_fit() -> None:
    """Catches: sources of another exchange read beside the rows."""
    with pytest.raises(ArgumentError, match="recv_source must be"):
        kernels.comm_combine(torch.zeros(4, 8), torch.zeros(3, 2, dtype=torch.int32), 3)
    with pytest.raises(ArgumentError, match="not initialised"):
        kernels.comm_combine(torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int32), 3, ranks=2)


def test_another_size_of_group_is_refused(tmp_path: Path) -> None:
    """Catches: a call for two ranks served by a group of one, whose counts would be read as those of two."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        with pytest.raises(ArgumentError, match="has 1 ranks, not 2"):
            kernels.comm_dispatch(**arguments(ranks=2))
        with pytest.raises(ArgumentError, match="no process group is called 'nobody'"):
            kernels.comm_dispatch(**arguments(ranks=2, group="nobody"))
    finally:
        distributed.destroy_process_group()


@pytest.mark.gpu
def test_one_rank_waits_for_nothing() -> None:
    """Catches: a count read on the host within one rank; a captured exchange would refuse it."""
    args = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in arguments().items()}
    from rapid_llm.kernels.ops.moe.exchange import comm_combine, comm_dispatch

    out = torch.empty(3, 8, device="cuda")
    comm_dispatch(**args)
    comm_combine(args["recv"], args["recv_source"], 3, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm_dispatch(**args)
        comm_combine(args["recv"], args["recv_source"], 3, out)
    args["input"].mul_(2)
    args["topk_ids"].copy_(torch.tensor([[-1, -1], [1, -1], [2, 3]]))
    graph.replay()
    assert torch.equal(out, args["input"] * torch.tensor([[0.0], [1.0], [1.0]], device="cuda"))
