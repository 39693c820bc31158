"""`fused_add_rmsnorm`: the residual sum and its norm, both in place.

`python -m benchmarks.kernels.fused_add_rmsnorm [--quick]`.
"""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import compiled, plain
from .values import normal


def torch_fused(input: Any, residual: Any, weight: Any, eps: float = 1e-6) -> None:
    import torch

    total = input.float() + residual.float()
    input.copy_(torch.nn.functional.rms_norm(total, weight.shape, weight.float(), eps))
    residual.copy_(total)


PEERS = {"torch": plain(torch_fused), "torch.compile": compiled(torch_fused)}


@parametrize("dtype", full=("fp32", "fp16", "bf16"), quick=("bf16",))
@parametrize("hidden", full=(576, 4096, 8192), quick=(4096,))
@parametrize("tokens", full=(1, 8, 64, 512, 4096), quick=(1, 64))
@benchmark("row", arms=arms_of("fused_add_rmsnorm", PEERS))
def fused_add_rmsnorm(g: Any, dtype: str, hidden: int, tokens: int) -> dict[str, Any]:
    shape = (tokens, hidden)
    return {
        "input": normal(g, shape, dtype),
        "residual": normal(g, shape, dtype),
        "weight": normal(g, (hidden,), dtype),
    }


if __name__ == "__main__":
    sys.exit(main(fused_add_rmsnorm))
