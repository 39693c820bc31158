"""`moe.topk`: the experts of each token. `python -m benchmarks.kernels.moe_topk [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import compiled, plain
from .values import normal

MODELS = {"qwen3-30b-a3b": (128, 8), "mixtral-8x7b": (8, 2), "toy": (6, 2)}
"""Experts, and how many of them a token takes."""


def torch_topk(logits: Any, k: int, renormalize: bool = True) -> Any:
    import torch

    weights, ids = torch.topk(torch.softmax(logits.float(), -1), k)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.to(torch.int32)


@parametrize("dtype", full=("fp32", "bf16"), quick=("bf16",))
@parametrize("experts", full=("qwen3-30b-a3b", "mixtral-8x7b"), quick=("qwen3-30b-a3b",))
@parametrize("tokens", full=(1, 8, 64, 512, 4096), quick=(1, 64))
@benchmark("row", arms=arms_of("moe.topk", {"torch": plain(torch_topk), "torch.compile": compiled(torch_topk)}))
def moe_topk(g: Any, dtype: str, experts: str, tokens: int) -> dict[str, Any]:
    count, k = MODELS[experts]
    return {"logits": normal(g, (tokens, count), dtype), "k": k}


if __name__ == "__main__":
    sys.exit(main(moe_topk))
