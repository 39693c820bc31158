"""`jit/rope_kvcache_write`: one call of a CUDA launcher, in place; see csrc/kvcache/rope_kvcache_write.cu."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from rapid_llm.kernels.jit import Kernel

_kernel: Final = Kernel("rope_kvcache_write", "kvcache/rope_kvcache_write.cu")
prepare: Final = _kernel.prepare


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
    _kernel[query.get_device()](
        query, key, value, k_cache, v_cache, positions, cos_sin_cache, slot_mapping, interleaved
    )
