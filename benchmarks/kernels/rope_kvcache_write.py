"""`rope_kvcache_write`: rotation and the write of keys and values, in one pass.

`python -m benchmarks.kernels.rope_kvcache_write [--quick]`.
"""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import arms_of, benchmark, parametrize

from .driver import main
from .kvcache_write import kvcache_write, torch_write
from .peers import compiled, plain
from .rope import rope, torch_rope
from .values import HEADS


def torch_both(
    query: Any,
    key: Any,
    value: Any,
    k_cache: Any,
    v_cache: Any,
    positions: Any,
    cos_sin_cache: Any,
    slot_mapping: Any,
    interleaved: bool = False,
) -> None:
    torch_rope(query, key, positions, cos_sin_cache)
    torch_write(key, value, k_cache, v_cache, slot_mapping)


PEERS = {"torch": plain(torch_both), "torch.compile": compiled(torch_both)}


@parametrize("dtype", full=("fp32", "bf16"), quick=("bf16",))
@parametrize("model", full=tuple(HEADS), quick=("llama3-8b",))
@parametrize("tokens", full=(1, 8, 64, 512, 4096), quick=(1, 64))
@benchmark("row", arms=arms_of("rope_kvcache_write", PEERS))
def rope_kvcache_write(g: Any, dtype: str, model: str, tokens: int) -> dict[str, Any]:
    return {**kvcache_write.make(g, dtype, model, tokens), **rope.make(g, dtype, model, tokens)}


if __name__ == "__main__":
    sys.exit(main(rope_kvcache_write))
