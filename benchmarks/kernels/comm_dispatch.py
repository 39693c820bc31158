"""`comm.dispatch` within one rank: rows to their experts. `python -m benchmarks.kernels.comm_dispatch [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .values import normal


@parametrize("dtype", full=("fp32", "bf16"), quick=("bf16",))
@parametrize("tokens", full=(1, 64, 1024), quick=(64,))
@benchmark("row", arms=arms_of("comm.dispatch"))
def comm_dispatch(g: Any, dtype: str, tokens: int) -> dict[str, Any]:
    import torch

    experts, topk, hidden = 64, 8, 4096
    return {
        "input": normal(g, (tokens, hidden), dtype),
        "topk_ids": torch.rand(tokens, experts, generator=g).argsort(1)[:, :topk].contiguous(),
        "topk_weights": torch.rand(tokens, topk, generator=g),
        "recv": normal(g, (tokens, hidden), dtype),
        "recv_ids": torch.zeros(tokens, topk, dtype=torch.int64),
        "recv_weights": torch.rand(tokens, topk, generator=g),
        "recv_source": torch.zeros(tokens, 2, dtype=torch.int32),
        "num_experts": experts,
    }


if __name__ == "__main__":
    sys.exit(main(comm_dispatch))
