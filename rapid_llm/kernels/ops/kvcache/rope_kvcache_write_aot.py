"""`aot/rope_kvcache_write`: one call of the extension's launcher, in place.

Built from csrc/kvcache/rope_kvcache_write.cu at the repository's root. Eager calls take the module's
function, which costs less on the host; under torch.compile it is the torch op.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.compiler import is_compiling

from rapid_llm.kernels import aot

_thin: Final = aot.load().rope_kvcache_write
_op: Final = torch.ops.rapid_llm.rope_kvcache_write.default


def rope_kvcache_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """rope_kvcache_write of CUDA tensors, heads, caches and table with a contiguous last dimension. See the op."""
    (_op if is_compiling() else _thin)(
        query, key, value, k_cache, v_cache, positions, cos_sin_cache, slot_mapping, interleaved
    )
