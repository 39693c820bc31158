"""`comm.combine` within one rank: rows back from their experts.

`python -m benchmarks.kernels.comm_combine [--quick]`.
"""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .values import normal


@parametrize("dtype", full=("fp32", "bf16"), quick=("bf16",))
@parametrize("tokens", full=(1, 64, 1024), quick=(64,))
@benchmark("row", arms=arms_of("comm.combine"))
def comm_combine(g: Any, dtype: str, tokens: int) -> dict[str, Any]:
    import torch

    source = torch.stack([torch.zeros(tokens, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32)], 1)
    return {"input": normal(g, (tokens, 4096), dtype), "recv_source": source, "tokens": tokens}


if __name__ == "__main__":
    sys.exit(main(comm_combine))
