"""The prefill wrapper: causal chunks, the weights rounded to the cache's dtype."""

from typing import Any

import torch

from ._paged import attend, check_cache, check_plan, keys_of

PLANS = []
"""One entry for each call of `plan`, so that tests can count them."""


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        check_plan(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, head_dim_qk, q_data_type, kv_data_type
        )
        assert causal
        assert sm_scale > 0
        assert qo_indptr.dtype == torch.int32
        assert qo_indptr.device.type == "cpu"
        assert len(qo_indptr) == len(paged_kv_indptr)
        assert int(qo_indptr[0]) == 0
        assert (qo_indptr.diff() >= 0).all()
        PLANS.append(len(qo_indptr) - 1)
        self._offsets = qo_indptr.tolist()
        self._plan = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._expects = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type)
        self._scale = sm_scale

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        check_cache(q, paged_kv_cache, out)
        k_cache, v_cache = paged_kv_cache
        if q.size(0) != self._offsets[-1]:
            raise ValueError(f"q.shape[0] ({q.size(0)}) does not match qo_indptr[-1] ({self._offsets[-1]})")
        assert self._expects == (q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1], q.dtype)
        for i, (begin, end) in enumerate(zip(self._offsets, self._offsets[1:], strict=False)):
            if begin == end:
                continue
            keys, values = keys_of(i, *self._plan, k_cache), keys_of(i, *self._plan, v_cache)
            assert len(keys) == 0 or end - begin <= len(keys)
            out[begin:end] = attend(q[begin:end], keys, values, self._scale, True, True)
        return out
