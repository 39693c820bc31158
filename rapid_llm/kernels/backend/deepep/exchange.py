"""`comm.dispatch` and `comm.combine` by DeepEP's kernels within a node.

What DeepEP's combine must know of the dispatch travels on the tensor `recv_source` that the caller hands from one to
the other. The capacity of `recv` is given as the most rows that can arrive, so that no count is read on the host.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rapid_llm.kernels.backend.deepep import LIBRARY
from rapid_llm.kernels.ops.arguments import check_disjoint, check_tensor, check_written
from rapid_llm.kernels.ops.moe.groups import check_combine, check_dispatch, process_group
from rapid_llm.kernels.registry import ArgumentError
from rapid_llm.kernels.registry.forking import Lock

_Buffer: Final[Any] = LIBRARY.function("Buffer")
_get_dispatch_config: Final = LIBRARY.function("get_dispatch_config")
_get_combine_config: Final = LIBRARY.function("get_combine_config")
_get_dispatch_layout: Final = LIBRARY.function("get_dispatch_layout")
_dispatch: Final = LIBRARY.function("dispatch")
_combine: Final = LIBRARY.function("combine")

_HANDLE: Final = "_rapid_llm_deepep"
_HANDLE_PARTS: Final = 6
_RANKS: Final = (2, 4, 8)
_lock: Final = Lock()
_buffers: Final[dict[Any, tuple[Any, int]]] = {}


class _Route(NamedTuple):
    """DeepEP's handle of a dispatch, and the version of the `recv_source` that it belongs to."""

    handle: tuple[Any, ...]
    version: int


def comm_dispatch(
    input: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    recv: Tensor,
    recv_ids: Tensor,
    recv_weights: Tensor,
    recv_source: Tensor,
    *,
    num_experts: int,
    ranks: int = 1,
    group: str = "",
) -> None:
    """Tokens to the ranks of their experts; the first call of a group or of wider rows makes buffers, collectively."""
    check_dispatch(input, topk_ids, topk_weights, recv, recv_ids, recv_weights, recv_source, num_experts, ranks)
    if recv.shape[0] < ranks * input.shape[0]:
        raise ArgumentError(
            f"comm.dispatch: deepep writes up to ranks * tokens rows unseen: recv has {recv.shape[0]}, it needs at "
            f"least {ranks * input.shape[0]}"
        )
    buffer, rank = _buffer("comm.dispatch", input, ranks, group)
    ids = topk_ids.to(torch.int64).contiguous()
    to_ranks, _, to_experts, goes, _ = _get_dispatch_layout(buffer, ids, num_experts)
    rows, experts, weights, _, handle, _ = _dispatch(
        buffer, input,
        num_tokens_per_rank=to_ranks, is_token_in_rank=goes, num_tokens_per_expert=to_experts,
        topk_idx=ids, topk_weights=topk_weights.contiguous(), num_worst_tokens=recv.shape[0],
    )  # fmt: skip
    if len(handle) != _HANDLE_PARTS:
        raise ArgumentError(
            f"comm.dispatch: deep_ep {LIBRARY.version()} gave a handle of {len(handle)} parts, this package reads "
            f"{_HANDLE_PARTS}; install deep_ep{LIBRARY.bounds}, or use native/comm.dispatch"
        )
    # Part 0, (ranks, ranks): rows that each rank has had from the ranks up to one; part 3: each row's token there.
    ends = handle[0][:, rank].contiguous()
    place = torch.arange(recv.shape[0], dtype=ends.dtype, device=ends.device)
    valid = (place < ends[-1])[:, None]
    source = torch.stack((torch.searchsorted(ends, place, right=True), handle[3].to(torch.int64)), 1)
    recv.copy_(torch.where(valid, rows, recv))
    recv_ids.copy_(torch.where(valid, experts, -1))
    recv_weights.copy_(torch.where(valid, weights, 0.0))
    recv_source.copy_(torch.where(valid, source, -1))
    setattr(recv_source, _HANDLE, _Route(handle, _version(recv_source)))


def comm_combine(
    input: Tensor,
    recv_source: Tensor,
    tokens: int,
    out: Tensor | None = None,
    *,
    ranks: int = 1,
    group: str = "",
) -> Tensor:
    """Rows back to their tokens, and their sums in fp32, rounded once."""
    check_combine(input, recv_source, tokens, ranks)
    route: _Route | None = getattr(recv_source, _HANDLE, None)
    if route is None or route.version != _version(recv_source):
        raise ArgumentError(
            "comm.combine: deepep/comm.combine takes the very recv_source tensor that deepep/comm.dispatch filled; use "
            "one backend for both, and do not write to it in between"
        )
    buffer, _ = _buffer("comm.combine", input, ranks, group)
    sums, _, _ = _combine(buffer, input, route.handle)
    shape = (tokens, input.shape[1])
    if sums.shape != shape:
        raise ArgumentError(f"comm.combine: {sums.shape[0]} tokens were dispatched, not {tokens}")
    if out is None:
        return torch.as_tensor(sums)
    check_tensor("comm.combine", "out", out, input, shape)
    check_written("comm.combine", "out", out)
    check_disjoint("comm.combine", "out", out, "input", input)
    return out.copy_(sums)


def _version(tensor: Tensor) -> int:
    """Grows with every write to `tensor`; 0 for inference tensors, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _buffer(op: str, rows: Tensor, ranks: int, group: str) -> tuple[Any, int]:
    """(the group's buffer, this rank). One buffer a group, made anew for wider rows."""
    if ranks not in _RANKS:
        raise ArgumentError(f"{op}: deepep exchanges among 2, 4 or 8 ranks of one node, not {ranks}")
    if rows.dtype is not torch.bfloat16 or not rows.is_contiguous():
        raise ArgumentError(f"{op}: deepep takes contiguous bfloat16 rows, got {rows.dtype} of strides {rows.stride()}")
    found, rank = process_group(op, ranks, group)
    needed = rows.shape[1] * rows.element_size()
    with _lock:
        buffer, width = _buffers.get(found, (None, 0))
        if buffer is None or width < needed:
            configs = (_get_dispatch_config(ranks), _get_combine_config(ranks))
            size = max(config.get_nvl_buffer_size_hint(needed, ranks) for config in configs)
            buffer = _Buffer(found, size, 0)
            _buffers[found] = (buffer, needed)
    return buffer, rank
