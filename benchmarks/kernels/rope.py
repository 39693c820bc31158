"""`rope`: rotation of query and key, in place. `python -m benchmarks.kernels.rope [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import compiled, plain
from .values import HEADS, normal, positions, rotary_table


def torch_rope(query: Any, key: Any, positions: Any, cos_sin_cache: Any, interleaved: bool = False) -> None:
    """Halves only, which is what the benchmark asks for."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, -1)
    for tensor in (query, key):
        a, b = tensor.float().chunk(2, -1)
        first, second = a * cos - b * sin, b * cos + a * sin
        tensor[..., : a.shape[-1]] = first
        tensor[..., a.shape[-1] :] = second


PEERS = {"torch": plain(torch_rope), "torch.compile": compiled(torch_rope)}


@parametrize("dtype", full=("fp32", "fp16", "bf16"), quick=("bf16",))
@parametrize("model", full=tuple(HEADS), quick=("llama3-8b",))
@parametrize("tokens", full=(1, 8, 64, 512, 4096), quick=(1, 64))
@benchmark("row", arms=arms_of("rope", PEERS))
def rope(g: Any, dtype: str, model: str, tokens: int) -> dict[str, Any]:
    query_heads, key_heads, dim = HEADS[model]
    return {
        "query": normal(g, (tokens, query_heads, dim), dtype),
        "key": normal(g, (tokens, key_heads, dim), dtype),
        "positions": positions(g, tokens),
        "cos_sin_cache": rotary_table(dim),
    }


if __name__ == "__main__":
    sys.exit(main(rope))
