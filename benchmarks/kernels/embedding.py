"""`embedding`: rows of a table. `python -m benchmarks.kernels.embedding [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import compiled, plain
from .values import normal


def torch_embedding(input: Any, weight: Any, dtype: Any = None, scheme: str = "unquantized") -> Any:
    import torch

    return torch.nn.functional.embedding(input, weight)


PEERS = {"torch": plain(torch_embedding), "torch.compile": compiled(torch_embedding)}


@parametrize("dtype", full=("fp32", "bf16"), quick=("bf16",))
@parametrize("vocabulary", full=(49152, 128256), quick=(128256,))
@parametrize("hidden", full=(576, 4096), quick=(4096,))
@parametrize("tokens", full=(1, 8, 64, 512, 4096), quick=(64,))
@benchmark("row", arms=arms_of("embedding", PEERS))
def embedding(g: Any, dtype: str, vocabulary: int, hidden: int, tokens: int) -> dict[str, Any]:
    import torch

    ids = torch.randint(0, vocabulary, (tokens,), generator=g)
    return {"input": ids, "weight": normal(g, (vocabulary, hidden), dtype)}


if __name__ == "__main__":
    sys.exit(main(embedding))
