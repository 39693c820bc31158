"""`rmsnorm`: the norm before attention and feed-forward. `python -m benchmarks.kernels.rmsnorm [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import compiled, plain
from .values import normal


def torch_rmsnorm(input: Any, weight: Any, eps: float = 1e-6) -> Any:
    import torch

    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)


def liger() -> Any:
    from liger_kernel.transformers.functional import liger_rms_norm

    return lambda input, weight, eps=1e-6: liger_rms_norm(input, weight, eps)


PEERS = {"torch": plain(torch_rmsnorm), "torch.compile": compiled(torch_rmsnorm), "liger": liger}


@parametrize("dtype", full=("fp32", "fp16", "bf16"), quick=("bf16",))
@parametrize("hidden", full=(576, 4096, 8192), quick=(4096,))
@parametrize("tokens", full=(1, 8, 64, 512, 4096), quick=(1, 64))
@benchmark("row", arms=arms_of("rmsnorm", PEERS))
def rmsnorm(g: Any, dtype: str, hidden: int, tokens: int) -> dict[str, Any]:
    return {"input": normal(g, (tokens, hidden), dtype), "weight": normal(g, (hidden,), dtype)}


if __name__ == "__main__":
    sys.exit(main(rmsnorm))
