"""`flashinfer/attention.decode.*`: split-KV decode over the paged cache, planned once a step.

Heads in groups of up to 3 run on CUDA cores, which keep the weights in fp32; larger groups on tensor cores, which round
them to the cache's dtype. Either way the partial results of a split sequence are kept in 16 bits. Scores must stay
within 5e4 in magnitude before scaling: flashinfer's mask is that number, not minus infinity.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from rapid_llm.kernels.backend.flashinfer import LIBRARY
from rapid_llm.kernels.backend.flashinfer._attention import LAYOUT, check, launch, operands
from rapid_llm.kernels.backend.flashinfer._calls import deliver, first_use, on_device
from rapid_llm.kernels.backend.flashinfer._plans import Batch, decode_batch, slot
from rapid_llm.kernels.ops.attention._paged import refuse_limits
from rapid_llm.kernels.registry import ArgumentError

_OP: Final = "attention.decode"
_Wrapper = LIBRARY.function("decode")
LIBRARY.function("decode.plan")  # a change upstream is to be found here, not in a request
LIBRARY.function("decode.run")

CUDA_CORE_GROUPS: Final = (1, 2, 3)
"""Query heads per kv head below which tensor cores have too little to multiply."""


def attention_decode(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query token per sequence over its paged cache. See `rapid_llm.kernels.attention_decode`.

    A sequence longer than its block table, or a page outside the cache, is an `ArgumentError`.
    """
    refuse_limits(f"flashinfer/{_OP}", window, softcap)
    check(_OP, query, k_cache, v_cache, seq_lens, block_table, out)
    sequences, heads, head_dim = query.shape
    if seq_lens.shape[0] != sequences:
        raise ArgumentError(f"{_OP}: {sequences} queries, but seq_lens has {seq_lens.shape[0]} entries")
    if sequences == 0:
        return deliver(torch.empty_like(query), out)
    pages, page_size, kv_heads, _ = k_cache.shape
    query, scale = operands(query, float(scale))
    tensor_cores = heads // kv_heads not in CUDA_CORE_GROUPS

    first_use(_OP, query.dtype, head_dim, tensor_cores)

    def plan(wrapper: Any, batch: Batch) -> None:
        with on_device(query):
            wrapper.plan(
                batch.indptr,
                batch.indices,
                batch.last_page,
                num_qo_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                page_size=page_size,
                sm_scale=scale,
                q_data_type=query.dtype,
                kv_data_type=query.dtype,
            )

    place = slot(
        f"decode {tensor_cores}",
        query.device,
        lambda workspace: _Wrapper(workspace, LAYOUT, use_tensor_cores=tensor_cores, backend="fa2"),
    )
    with place.lock:
        batch = place.plan(
            (heads, kv_heads, head_dim, page_size, pages, scale, query.dtype),
            (seq_lens, block_table),
            lambda: decode_batch(_OP, seq_lens, block_table, pages, page_size),
            plan,
        )
        return launch(place.wrapper, batch, query, k_cache, v_cache, out)
