"""`attention.mla_decode`: one token a sequence over a latent cache, in DeepSeek's sizes.

`python -m benchmarks.kernels.attention_mla_decode [--quick]`.
"""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .peers import plain
from .values import lengths, normal, pages

PAGE = 64


def torch_mla(query: Any, kv_cache: Any, seq_lens: Any, block_table: Any, scale: float, value_dim: int = 512) -> Any:
    """Gathers the pages, then torch's own attention; all sequences are equally long, as the benchmark makes them."""
    import torch

    rows = kv_cache[block_table.long()].flatten(1, 3)[:, None]
    found = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None], rows, rows[..., :value_dim], scale=scale, enable_gqa=True
    )
    return found[:, :, 0]


@parametrize("dtype", full=("fp32", "fp16", "bf16"), quick=("bf16",))
@parametrize("heads", full=(16, 128), quick=(128,))
@parametrize("sequences", full=(1, 8, 64), quick=(8,))
@parametrize("length", full=(128, 1024, 8192), quick=(1024,))
@benchmark("row", arms=arms_of("attention.mla_decode", torch=plain(torch_mla), roundings=("probs:bf16", "probs:fp16")))
def attention_mla_decode(g: Any, dtype: str, heads: int, sequences: int, length: int) -> dict[str, Any]:
    count, table = pages(g, sequences, length, PAGE)
    return {
        "query": normal(g, (sequences, heads, 576), dtype),
        "kv_cache": normal(g, (count, PAGE, 1, 576), dtype),
        "seq_lens": lengths(sequences, length),
        "block_table": table,
        "scale": 192**-0.5,
        "value_dim": 512,
    }


if __name__ == "__main__":
    sys.exit(main(attention_mla_decode))
