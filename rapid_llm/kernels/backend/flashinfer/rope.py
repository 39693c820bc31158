"""`flashinfer/rope.*`: in place, both pairings.

flashinfer has fast, in-place-safe kernels where the rotated part is 64, 128, 256 or 512 wide and fills the head; a
wider head is given as a view of its rotated part. The interleaved kernel loads half a vector of angles more than it
uses, at the last position from behind the table: a table with nothing behind it is copied into one with a spare row.
"""

from __future__ import annotations

import torch

from rapid_llm.kernels.backend.flashinfer import LIBRARY
from rapid_llm.kernels.backend.flashinfer._calls import check_rows, first_use, on_device
from rapid_llm.kernels.ops.arguments import check_disjoint, check_kind, check_written
from rapid_llm.kernels.registry import ArgumentError

_rope = LIBRARY.function("rope")
_INTEGERS = (torch.int32, torch.int64)


def rope(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Rotate query and key in place by their positions, in fp32. See `rapid_llm.kernels.rope`."""
    rotary = cos_sin_cache.shape[-1]
    if query.dim() != 3 or key.dim() != 3 or query.shape[::2] != key.shape[::2] or rotary > query.shape[2]:
        raise ArgumentError(
            "rope: query and key must be (tokens, heads, head_dim) of the same tokens and head_dim, no narrower than "
            f"cos_sin_cache's {rotary}: got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    if positions.shape != query.shape[:1] or positions.dtype not in _INTEGERS or positions.device != query.device:
        raise ArgumentError(
            f"rope: positions must be ({query.shape[0]},) int32 or int64 on the same CUDA device, {query.device}: "
            f"got {tuple(positions.shape)} {positions.dtype} on {positions.device}"
        )
    if cos_sin_cache.dtype is not torch.float32 or cos_sin_cache.device != query.device:
        raise ArgumentError(
            f"rope: cos_sin_cache must be float32 on the same CUDA device, {query.device}: got {cos_sin_cache.dtype} "
            f"on {cos_sin_cache.device}"
        )
    check_kind("rope", "key", key, query)
    for name, tensor in (("query", query), ("key", key), ("cos_sin_cache", cos_sin_cache)):
        check_rows("rope", name, tensor)
    check_written("rope", "query", query)
    check_written("rope", "key", key)
    check_disjoint("rope", "query", query, "key", key)
    if not query.shape[0]:
        return
    first_use("rope")
    if interleaved and _ends_memory(cos_sin_cache):
        cos_sin_cache = torch.cat((cos_sin_cache, cos_sin_cache.new_zeros(1, rotary)))
    with on_device(query):
        _rope(
            positions=positions.contiguous(),
            query=query[..., :rotary],
            key=key[..., :rotary],
            head_size=rotary,
            cos_sin_cache=cos_sin_cache,
            is_neox=not interleaved,
        )


def _ends_memory(table: torch.Tensor) -> bool:
    """Whether less than a row of memory follows the table."""
    end = (table.storage_offset() + table.numel() + table.shape[1]) * table.element_size()
    return end > table.untyped_storage().nbytes()
