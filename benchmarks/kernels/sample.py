"""`sample`: an id from a row of logits. `python -m benchmarks.kernels.sample [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import plain
from .values import normal, uniform


def torch_sample(logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, uniform: Any) -> Any:
    """Without filters, which the first case asks for: inverse of the cumulative sum."""
    import torch

    sums = torch.softmax(logits.float() / temperature[:, None], -1).cumsum(-1)
    return torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0]


@parametrize("filters", full=("none", "top_p"), quick=("none",))
@parametrize("vocabulary", full=(49152, 128256), quick=(128256,))
@parametrize("rows", full=(1, 8, 64), quick=(1, 8))
@benchmark("row", arms=arms_of("sample", torch=plain(torch_sample)))
def sample(g: Any, filters: str, vocabulary: int, rows: int) -> dict[str, Any]:
    import torch

    chosen = filters == "top_p"
    return {
        "logits": normal(g, (rows, vocabulary), "fp32", 3.0),
        "temperature": uniform(g, rows, 0.5, 1.5),
        "top_k": torch.full((rows,), -1, dtype=torch.int32),
        "top_p": uniform(g, rows, 0.8, 0.95) if chosen else torch.ones(rows),
        "min_p": torch.zeros(rows),
        "uniform": torch.rand(rows, generator=g),
    }


if __name__ == "__main__":
    sys.exit(main(sample))
