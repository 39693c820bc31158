"""`flashinfer/attention.prefill.*`: causal attention of ragged chunks over the paged cache, planned once a step.

The FlashAttention-2 kernels: fp32 scores, weights rounded to the cache's dtype before the second product, partial
results of split sequences in 16 bits. Scores must stay within 5e4 in magnitude before scaling, and values of keys that
the causal mask hides must be finite: flashinfer multiplies them by 0.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from rapid_llm.kernels.backend.flashinfer import LIBRARY
from rapid_llm.kernels.backend.flashinfer._attention import LAYOUT, check, launch, operands
from rapid_llm.kernels.backend.flashinfer._calls import deliver, first_use, on_device
from rapid_llm.kernels.backend.flashinfer._plans import Batch, prefill_batch, slot
from rapid_llm.kernels.ops.attention._paged import refuse_limits
from rapid_llm.kernels.registry import ArgumentError

_OP: Final = "attention.prefill"
_Wrapper = LIBRARY.function("prefill")
LIBRARY.function("prefill.plan")  # a change upstream is to be found here, not in a request
LIBRARY.function("prefill.run")


def attention_prefill(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of ragged query chunks over the paged cache. See `rapid_llm.kernels.attention_prefill`.

    A sequence longer than its block table, or a page outside the cache, is an `ArgumentError`.
    """
    refuse_limits(f"flashinfer/{_OP}", window, softcap)
    check(_OP, query, k_cache, v_cache, seq_lens, block_table, out)
    if cu_seqlens_q.shape != (seq_lens.shape[0] + 1,) or cu_seqlens_q.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"{_OP}: cu_seqlens_q must be ({seq_lens.shape[0] + 1},) int32, "
            f"got {tuple(cu_seqlens_q.shape)} {cu_seqlens_q.dtype}"
        )
    tokens, heads, head_dim = query.shape
    if tokens == 0:
        return deliver(torch.empty_like(query), out)
    pages, page_size, kv_heads, _ = k_cache.shape
    query, scale = operands(query, float(scale))

    first_use(_OP, query.dtype, head_dim)

    def plan(wrapper: Any, batch: Batch) -> None:
        with on_device(query):
            wrapper.plan(
                batch.offsets,
                batch.indptr,
                batch.indices,
                batch.last_page,
                num_qo_heads=heads,
                num_kv_heads=kv_heads,
                head_dim_qk=head_dim,
                page_size=page_size,
                causal=True,
                sm_scale=scale,
                q_data_type=query.dtype,
                kv_data_type=query.dtype,
            )

    place = slot("prefill", query.device, lambda workspace: _Wrapper(workspace, LAYOUT, backend="fa2"))
    with place.lock:
        batch = place.plan(
            (tokens, heads, kv_heads, head_dim, page_size, pages, scale, query.dtype),
            (cu_seqlens_q, seq_lens, block_table),
            lambda: prefill_batch(_OP, cu_seqlens_q, seq_lens, block_table, tokens, pages, page_size),
            plan,
        )
        return launch(place.wrapper, batch, query, k_cache, v_cache, out)
