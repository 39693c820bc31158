"""`attention.decode`: one token a sequence over a paged cache.

`python -m benchmarks.kernels.attention_decode [--quick]`.
"""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import plain
from .values import HEADS, PAGE, lengths, normal, pages


def torch_decode(query: Any, k_cache: Any, v_cache: Any, seq_lens: Any, block_table: Any, scale: float) -> Any:
    """Gathers the pages, then torch's own attention; all sequences are equally long, as the benchmark makes them."""
    import torch

    def gather(cache: Any) -> Any:
        rows = cache[block_table.long()].flatten(1, 2)
        return rows.transpose(1, 2)

    found = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None], gather(k_cache), gather(v_cache), scale=scale, enable_gqa=True
    )
    return found[:, :, 0]


@parametrize("dtype", full=("fp32", "fp16", "bf16"), quick=("bf16",))
@parametrize("model", full=tuple(HEADS), quick=("llama3-8b",))
@parametrize("sequences", full=(1, 8, 64), quick=(1, 8))
@parametrize("length", full=(128, 1024, 8192), quick=(1024,))
@benchmark("row", arms=arms_of("attention.decode", torch=plain(torch_decode), roundings=("probs:bf16", "probs:fp16")))
def attention_decode(g: Any, dtype: str, model: str, sequences: int, length: int) -> dict[str, Any]:
    query_heads, key_heads, dim = HEADS[model]
    count, table = pages(g, sequences, length)
    cache = (count, PAGE, key_heads, dim)
    return {
        "query": normal(g, (sequences, query_heads, dim), dtype),
        "k_cache": normal(g, cache, dtype),
        "v_cache": normal(g, cache, dtype),
        "seq_lens": lengths(sequences, length),
        "block_table": table,
        "scale": dim**-0.5,
    }


if __name__ == "__main__":
    sys.exit(main(attention_decode))
