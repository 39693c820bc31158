"""`rmsnorm_linear`: a norm and the linear layer behind it. `python -m benchmarks.kernels.rmsnorm_linear [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import compiled, plain
from .values import normal

SHAPES = {"smollm2-135m qkv": (960, 576), "llama3.2-1b qkv": (3072, 2048), "llama3-8b qkv": (6144, 4096)}
"""Outputs and inputs of a layer's weights."""


def torch_rmsnorm_linear(input: Any, norm_weight: Any, weight: Any, bias: Any = None, eps: float = 1e-6) -> Any:
    import torch

    normed = torch.nn.functional.rms_norm(input, norm_weight.shape, norm_weight, eps)
    return torch.nn.functional.linear(normed, weight, bias)


PEERS = {"torch": plain(torch_rmsnorm_linear), "torch.compile": compiled(torch_rmsnorm_linear)}


@parametrize("dtype", full=("fp32", "fp16", "bf16"), quick=("bf16",))
@parametrize("shape", full=tuple(SHAPES), quick=("llama3-8b qkv",))
@parametrize("tokens", full=(1, 8, 64, 512), quick=(1, 64))
@benchmark("row", arms=arms_of("rmsnorm_linear", PEERS))
def rmsnorm_linear(g: Any, dtype: str, shape: str, tokens: int) -> dict[str, Any]:
    outputs, inputs = SHAPES[shape]
    return {
        "input": normal(g, (tokens, inputs), dtype),
        "norm_weight": normal(g, (inputs,), dtype),
        "weight": normal(g, (outputs, inputs), dtype, 0.05),
    }


if __name__ == "__main__":
    sys.exit(main(rmsnorm_linear))
