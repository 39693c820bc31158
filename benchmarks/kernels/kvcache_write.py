"""`kvcache.write`: keys and values into their pages. `python -m benchmarks.kernels.kvcache_write [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import compiled, plain
from .values import HEADS, PAGE, normal


def torch_write(key: Any, value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
    """Without padding, which the benchmark does not ask for."""
    k_cache.view(-1, *k_cache.shape[2:])[slot_mapping] = key
    v_cache.view(-1, *v_cache.shape[2:])[slot_mapping] = value


PEERS = {"torch": plain(torch_write), "torch.compile": compiled(torch_write)}


@parametrize("dtype", full=("fp32", "bf16"), quick=("bf16",))
@parametrize("model", full=tuple(HEADS), quick=("llama3-8b",))
@parametrize("tokens", full=(1, 8, 64, 512, 4096), quick=(64,))
@benchmark("row", arms=arms_of("kvcache.write", PEERS))
def kvcache_write(g: Any, dtype: str, model: str, tokens: int) -> dict[str, Any]:
    import torch

    _, heads, dim = HEADS[model]
    pages = max(2 * tokens // PAGE, 64)
    cache = (pages, PAGE, heads, dim)
    return {
        "key": normal(g, (tokens, heads, dim), dtype),
        "value": normal(g, (tokens, heads, dim), dtype),
        "k_cache": normal(g, cache, dtype),
        "v_cache": normal(g, cache, dtype),
        "slot_mapping": torch.randperm(pages * PAGE, generator=g)[:tokens],
    }


if __name__ == "__main__":
    sys.exit(main(kvcache_write))
