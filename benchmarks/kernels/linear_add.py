"""`linear_add`: a linear layer added to the residual. `python -m benchmarks.kernels.linear_add [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import compiled, plain
from .values import normal

SHAPES = {
    "smollm2-135m down": (576, 1536),
    "llama3.2-1b o": (2048, 2048),
    "llama3.2-1b down": (2048, 8192),
    "llama3-8b o": (4096, 4096),
    "llama3-8b down": (4096, 14336),
}
"""Outputs and inputs of a layer's weights."""


def torch_linear_add(input: Any, weight: Any, residual: Any) -> None:
    import torch

    residual.add_(torch.nn.functional.linear(input, weight))


PEERS = {"torch": plain(torch_linear_add), "torch.compile": compiled(torch_linear_add)}


@parametrize("dtype", full=("fp32", "fp16", "bf16"), quick=("bf16",))
@parametrize("shape", full=tuple(SHAPES), quick=("llama3-8b o",))
@parametrize("tokens", full=(1, 8, 64, 512), quick=(1, 64))
@benchmark("row", arms=arms_of("linear_add", PEERS))
def linear_add(g: Any, dtype: str, shape: str, tokens: int) -> dict[str, Any]:
    outputs, inputs = SHAPES[shape]
    return {
        "input": normal(g, (tokens, inputs), dtype),
        "weight": normal(g, (outputs, inputs), dtype, 0.05),
        "residual": normal(g, (tokens, outputs), dtype),
    }


if __name__ == "__main__":
    sys.exit(main(linear_add))
