"""`cpp/attention.decode`: a paged fp32 cache read in place, all sequences and heads in one C++ call.

See csrc/attention/attention_decode.cpp.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import load_cpp
from rapid_llm.kernels.ops.attention._paged import refuse_limits

_library: Final = load_cpp("attention_decode", "attention/attention_decode.cpp")


def attention_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """attention.decode of fp32 tensors that are dense in their last dimension; see the op."""
    if window or softcap:
        refuse_limits("cpp/attention.decode", window, softcap)
    if out is None:
        out = query.new_empty(query.shape)
    _library.attention_decode(out, query, k_cache, v_cache, seq_lens, block_table, scale, torch.get_num_threads())
    return out
