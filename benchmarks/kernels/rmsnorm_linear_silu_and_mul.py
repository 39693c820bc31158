"""`rmsnorm_linear_silu_and_mul`: a feed-forward block up to its activation.

`python -m benchmarks.kernels.rmsnorm_linear_silu_and_mul [--quick]`.
"""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import compiled, plain
from .values import normal

SHAPES = {
    "smollm2-135m gate_up": (1536, 576),
    "llama3.2-1b gate_up": (8192, 2048),
    "llama3-8b gate_up": (14336, 4096),
}
"""Width of the block and inputs."""


def torch_gated(input: Any, norm_weight: Any, weight: Any, eps: float = 1e-6) -> Any:
    import torch

    normed = torch.nn.functional.rms_norm(input, norm_weight.shape, norm_weight, eps)
    gate, up = torch.nn.functional.linear(normed, weight).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


PEERS = {"torch": plain(torch_gated), "torch.compile": compiled(torch_gated)}


@parametrize("dtype", full=("fp32", "fp16", "bf16"), quick=("bf16",))
@parametrize("shape", full=tuple(SHAPES), quick=("llama3-8b gate_up",))
@parametrize("tokens", full=(1, 8, 64, 512), quick=(1, 64))
@benchmark("row", arms=arms_of("rmsnorm_linear_silu_and_mul", PEERS))
def rmsnorm_linear_silu_and_mul(g: Any, dtype: str, shape: str, tokens: int) -> dict[str, Any]:
    inter, inputs = SHAPES[shape]
    return {
        "input": normal(g, (tokens, inputs), dtype),
        "norm_weight": normal(g, (inputs,), dtype),
        "weight": normal(g, (2 * inter, inputs), dtype, 0.05),
    }


if __name__ == "__main__":
    sys.exit(main(rmsnorm_linear_silu_and_mul))
