"""The decode wrapper: CUDA cores keep the weights in fp32, tensor cores round them."""

from typing import Any

import torch

from ._paged import attend, check_cache, check_plan, keys_of

PLANS = []
"""One entry for each call of `plan`, so that tests can count them."""


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        assert kv_layout == "NHD"
        assert not float_workspace_buffer.any()
        self._tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        check_plan(indptr, indices, last_page_len, page_size, head_dim, q_data_type, kv_data_type)
        assert self._tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8)
        assert sm_scale > 0
        PLANS.append(len(last_page_len))
        self._plan = (indptr, indices, last_page_len)
        self._expects = (num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type)
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
        q_len_per_req: int | None = 1,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        check_cache(q, paged_kv_cache, out)
        k_cache, v_cache = paged_kv_cache
        assert len(q) == len(self._plan[2])
        assert self._expects == (q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1], q.dtype)
        for i in range(len(q)):
            keys, values = keys_of(i, *self._plan, k_cache), keys_of(i, *self._plan, v_cache)
            out[i : i + 1] = attend(q[i : i + 1], keys, values, self._scale, False, self._tensor_cores)
        return out
