"""`silu_and_mul`: the gate of a feed-forward layer. `python -m benchmarks.kernels.silu_and_mul [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import compiled, plain
from .values import normal


def torch_silu(input: Any) -> Any:
    import torch

    gate, up = input.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def liger() -> Any:
    from liger_kernel.transformers.functional import liger_swiglu

    def swiglu(input: Any) -> Any:
        gate, up = input.chunk(2, -1)
        return liger_swiglu(gate, up)

    return swiglu


PEERS = {"torch": plain(torch_silu), "torch.compile": compiled(torch_silu), "liger": liger}


@parametrize("dtype", full=("fp32", "fp16", "bf16"), quick=("bf16",))
@parametrize("width", full=(1536, 14336), quick=(14336,))
@parametrize("tokens", full=(1, 8, 64, 512, 4096), quick=(1, 64))
@benchmark("row", arms=arms_of("silu_and_mul", PEERS))
def silu_and_mul(g: Any, dtype: str, width: int, tokens: int) -> dict[str, Any]:
    return {"input": normal(g, (tokens, 2 * width), dtype)}


if __name__ == "__main__":
    sys.exit(main(silu_and_mul))
