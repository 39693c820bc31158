"""FlashMLA's dense decode with torch: weights rounded as the tensor cores read them, one schedule for one call."""

import torch


class FlashMLASchedMeta:
    """The schedule: made by the first call from its lengths."""

    lengths = None


def get_mla_metadata(*args, **kwargs):
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits=None,
    softmax_scale=None,
    causal=False,
    is_fp8_kvcache=False,
    indices=None,
    attn_sink=None,
):
    schedule = tile_scheduler_metadata
    assert isinstance(schedule, FlashMLASchedMeta)
    assert num_splits is None
    assert schedule.lengths is None or torch.equal(schedule.lengths, cache_seqlens)
    schedule.lengths = cache_seqlens.clone()
    return _decode(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale)


def _decode(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale):
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.dtype == k_cache.dtype
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    assert cache_seqlens.is_contiguous()
    assert q.stride(-1) == k_cache.stride(-1) == block_table.stride(-1) == 1
    assert k_cache.shape[1:] == (64, 1, q.shape[3])
    assert head_dim_v == 512
    batch, steps, heads, _ = q.shape
    out = torch.full((batch, steps, heads, head_dim_v), float("nan"), dtype=q.dtype)
    for i, length in enumerate(cache_seqlens.tolist()):
        if length:
            rows = k_cache[block_table[i, : -(-length // 64)].long()].flatten(0, 2)[:length].float()
            scores = q[i, 0].float() @ rows.T * softmax_scale
            weights = (scores - scores.amax(1, keepdim=True)).exp()
            out[i, 0] = weights.to(q.dtype).float() @ rows[:, :head_dim_v] / weights.sum(1, keepdim=True)
    return out, torch.zeros(batch, heads, steps)
