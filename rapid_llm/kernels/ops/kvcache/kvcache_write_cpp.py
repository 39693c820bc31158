"""`cpp/kvcache.write`: key and value of all tokens in one C++ call, any dtype; see csrc/kvcache/kvcache_write.cpp."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from rapid_llm.kernels.cpp import load_cpp

_library: Final = load_cpp("kvcache_write", "kvcache/kvcache_write.cpp")


def kvcache_write(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """kvcache.write of tensors that are dense in their last dimension; see the op."""
    _library.kvcache_write(key, value, k_cache, v_cache, slot_mapping)
