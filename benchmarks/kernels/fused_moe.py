"""`fused_moe`: the experts of every token. `python -m benchmarks.kernels.fused_moe [--quick]`.

torch's arm is the loop over experts that model code has; it reads counts on the host, so no graph holds it.
"""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import plain
from .values import normal

MODELS = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "mixtral-8x7b, a quarter": (4096, 3584, 8, 2),
    "toy": (32, 16, 6, 2),
}
"""hidden, intermediate, experts, topk."""


def torch_experts(input: Any, gate_up: Any, down: Any, topk_weights: Any, topk_ids: Any) -> Any:
    import torch

    total = torch.zeros(input.shape, dtype=torch.float32, device=input.device)
    for expert in topk_ids.unique().tolist():
        token, choice = torch.where(topk_ids == expert)
        gate, up = torch.nn.functional.linear(input[token], gate_up[expert]).chunk(2, -1)
        found = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down[expert])
        total.index_add_(0, token, found.float() * topk_weights[token, choice, None])
    return total.to(input.dtype)


@parametrize("dtype", full=("fp32", "fp16", "bf16"), quick=("bf16",))
@parametrize("experts", full=("qwen3-30b-a3b", "mixtral-8x7b, a quarter"), quick=("qwen3-30b-a3b",))
@parametrize("tokens", full=(1, 8, 64, 512, 4096), quick=(1, 64))
@benchmark("row", arms=arms_of("fused_moe", {"torch": plain(torch_experts)}))
def fused_moe(g: Any, dtype: str, experts: str, tokens: int) -> dict[str, Any]:
    import torch

    hidden, inter, count, topk = MODELS[experts]
    return {
        "input": normal(g, (tokens, hidden), dtype),
        "gate_up": normal(g, (count, 2 * inter, hidden), dtype),
        "down": normal(g, (count, hidden, inter), dtype),
        "topk_weights": torch.rand(tokens, topk, generator=g),
        "topk_ids": torch.rand(tokens, count, generator=g).argsort(1)[:, :topk].to(torch.int32),
    }


if __name__ == "__main__":
    sys.exit(main(fused_moe))
