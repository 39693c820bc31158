"""`gelu_and_mul`: the gate of a feed-forward layer of Gemma. `python -m benchmarks.kernels.gelu_and_mul [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import compiled, plain
from .values import normal


def torch_gelu(input: Any) -> Any:
    import torch

    gate, up = input.chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def liger() -> Any:
    from liger_kernel.transformers.functional import liger_geglu

    def geglu(input: Any) -> Any:
        gate, up = input.chunk(2, -1)
        return liger_geglu(gate, up)

    return geglu


PEERS = {"torch": plain(torch_gelu), "torch.compile": compiled(torch_gelu), "liger": liger}


@parametrize("dtype", full=("fp32", "fp16", "bf16"), quick=("bf16",))
@parametrize("width", full=(2048, 9216), quick=(9216,))
@parametrize("tokens", full=(1, 8, 64, 512, 4096), quick=(1, 64))
@benchmark("row", arms=arms_of("gelu_and_mul", PEERS))
def gelu_and_mul(g: Any, dtype: str, width: int, tokens: int) -> dict[str, Any]:
    return {"input": normal(g, (tokens, 2 * width), dtype)}


if __name__ == "__main__":
    sys.exit(main(gelu_and_mul))
