"""`scale`: one pass over memory. `python -m benchmarks.kernels.scale [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import compiled, plain
from .values import normal


def torch_scale(input: Any, factor: float, out: Any = None) -> Any:
    import torch

    return torch.mul(input, factor, out=out)


PEERS = {"torch": plain(torch_scale), "torch.compile": compiled(torch_scale)}


@parametrize("dtype", full=("fp32", "fp16", "bf16"), quick=("fp16",))
@parametrize("size", full=(*(2**n for n in range(10, 20)), 2**22, 2**25, 2**28), quick=(4096,))
@benchmark("row", arms=arms_of("scale", PEERS))
def scale(g: Any, dtype: str, size: int) -> dict[str, Any]:
    return {"input": normal(g, (size,), dtype), "factor": 0.3}


if __name__ == "__main__":
    sys.exit(main(scale))
