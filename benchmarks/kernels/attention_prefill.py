"""`attention.prefill`: whole chunks over a paged cache. `python -m benchmarks.kernels.attention_prefill [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import plain
from .values import HEADS, PAGE, lengths, normal, pages


def torch_prefill(
    query: Any, k_cache: Any, v_cache: Any, cu_seqlens_q: Any, seq_lens: Any, block_table: Any, scale: float
) -> Any:
    """Gathers the pages, then torch's own attention; whole sequences of equal length, as the benchmark makes them."""
    import torch

    sequences = block_table.shape[0]

    def gather(cache: Any) -> Any:
        return cache[block_table.long()].flatten(1, 2).transpose(1, 2)

    rows = query.view(sequences, -1, *query.shape[1:]).transpose(1, 2)
    found = torch.nn.functional.scaled_dot_product_attention(
        rows, gather(k_cache), gather(v_cache), is_causal=True, scale=scale, enable_gqa=True
    )
    return found.transpose(1, 2).reshape(query.shape)


@parametrize("dtype", full=("fp32", "fp16", "bf16"), quick=("bf16",))
@parametrize("model", full=tuple(HEADS), quick=("llama3-8b",))
@parametrize("sequences", full=(1, 4), quick=(1,))
@parametrize("length", full=(128, 1024, 4096), quick=(1024,))
@benchmark("row", arms=arms_of("attention.prefill", torch=plain(torch_prefill), roundings=("probs:bf16", "probs:fp16")))
def attention_prefill(g: Any, dtype: str, model: str, sequences: int, length: int) -> dict[str, Any]:
    import torch

    query_heads, key_heads, dim = HEADS[model]
    count, table = pages(g, sequences, length)
    cache = (count, PAGE, key_heads, dim)
    return {
        "query": normal(g, (sequences * length, query_heads, dim), dtype),
        "k_cache": normal(g, cache, dtype),
        "v_cache": normal(g, cache, dtype),
        "cu_seqlens_q": torch.arange(sequences + 1, dtype=torch.int32) * length,
        "seq_lens": lengths(sequences, length),
        "block_table": table,
        "scale": dim**-0.5,
    }


if __name__ == "__main__":
    sys.exit(main(attention_prefill))
