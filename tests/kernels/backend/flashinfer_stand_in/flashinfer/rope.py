"""Rotation in place, the table read by position."""

import torch

from ._demands import dense, rows, some


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError("cos_sin_cache should be float32")
    if not cos_sin_cache.is_contiguous():  # upstream checks this one itself
        raise RuntimeError("cos_sin_cache must be contiguous")
    assert cos_sin_cache.shape[1] == head_size
    assert head_size in (64, 128, 256, 512)
    assert positions.is_contiguous()
    assert positions.dtype in (torch.int32, torch.int64)
    dense(cos_sin_cache)
    if not is_neox:  # reads beyond the last row
        behind = cos_sin_cache.storage_offset() + cos_sin_cache.numel() + 8
        assert int(positions.max()) < len(cos_sin_cache) - 1 or behind * 4 <= cos_sin_cache.untyped_storage().nbytes()
    table = cos_sin_cache[positions.long()].double()[:, None]
    cos, sin = table.chunk(2, -1)
    for tensor in (query, key):
        view = tensor.view(tensor.shape[0], -1, head_size)
        some(view)
        rows(view, 16)
        half = head_size // 2
        a, b = (view[..., :half], view[..., half:]) if is_neox else (view[..., ::2], view[..., 1::2])
        x, y = a.double(), b.double()
        a.copy_(_flushed(x * cos - y * sin))
        b.copy_(_flushed(y * cos + x * sin))


def _flushed(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.abs() < torch.finfo(torch.float32).tiny, 0.0, values)
