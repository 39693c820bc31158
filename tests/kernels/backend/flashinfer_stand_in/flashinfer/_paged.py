"""Attention over pages as both wrappers compute it: in parts that are rounded before they are joined."""

import torch

from ._demands import HALF, dense, rows

PART = 40
"""Keys in a part: neither a page nor a multiple of one."""


def check_cache(q, paged_kv_cache, out) -> None:
    k_cache, v_cache = paged_kv_cache
    assert k_cache.stride() == v_cache.stride()
    assert q.dtype == k_cache.dtype == v_cache.dtype == out.dtype
    assert out.shape == q.shape
    dense(out)
    for tensor in (q, k_cache, v_cache):
        rows(tensor, 16)


def check_plan(indptr, indices, last_page_len, page_size, head_dim, q_data_type, kv_data_type) -> None:
    assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
    assert indptr.device.type == "cpu"
    assert len(indptr) == len(last_page_len) + 1
    assert int(indptr[-1]) == len(indices) > 0
    counts = indptr.diff()
    assert (last_page_len <= page_size).all()
    assert (last_page_len[counts > 0] >= 1).all()
    assert head_dim in (64, 128, 256)
    assert q_data_type == kv_data_type
    assert q_data_type in HALF


def keys_of(i, indptr, indices, last_page_len, cache):
    """(length, kv_heads, head_dim) float64 of sequence i; its length as upstream works it out."""
    pages = indices[indptr[i] : indptr[i + 1]].long()
    length = (len(pages) - 1) * cache.shape[1] + int(last_page_len[i]) if len(pages) else 0
    return cache[pages].flatten(0, 1)[:length].double()


def attend(query, keys, values, scale, causal, round_weights):
    """(q, heads, dim) float64. A row that sees nothing gives nonsense, as upstream's may."""
    rows_, heads, _ = query.shape
    if len(keys) == 0:
        return torch.full(query.shape, 7.0, dtype=torch.float64)
    group = heads // keys.shape[1]
    k, v = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,nhd->hqn", query.double(), k) * scale
    if causal:
        hidden = torch.ones(rows_, len(k), dtype=torch.bool).triu(len(k) - rows_ + 1)
        scores = scores.masked_fill(hidden, -5e4 * scale)
    outs, masses, tops = [], [], []
    for part, value in zip(scores.split(PART, -1), v.split(PART), strict=True):
        top = part.amax(-1, keepdim=True)
        weights = (part - top).exp()
        if round_weights:
            weights = weights.to(query.dtype).double()
        mass = weights.sum(-1, keepdim=True)
        out = torch.einsum("hqn,nhd->hqd", weights, value) / mass
        outs.append(out.to(query.dtype).double() if len(k) > PART else out)
        masses.append(mass)
        tops.append(top)
    highest = torch.stack(tops).amax(0)
    shares = torch.stack([m * (t - highest).exp() for m, t in zip(masses, tops, strict=True)])
    joined = (torch.stack(outs) * shares).sum(0) / shares.sum(0)
    return joined.transpose(0, 1)
