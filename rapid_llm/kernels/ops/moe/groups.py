"""Argument checks of the exchange ops, and the process group that a call names."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.arguments import check_kind, check_written
from rapid_llm.kernels.registry import ArgumentError

_IDS: Final = (torch.int64, torch.int32)


def check_dispatch(
    input: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    recv: Tensor,
    recv_ids: Tensor,
    recv_weights: Tensor,
    recv_source: Tensor,
    num_experts: int,
    ranks: int,
) -> None:
    """Raise `ArgumentError` for shapes, dtypes or devices that would make the result silently wrong."""
    op = "comm.dispatch"
    if ranks < 1 or num_experts < 1 or num_experts % ranks:
        raise ArgumentError(f"{op}: {num_experts} experts do not divide among {ranks} ranks")
    if input.dim() != 2 or recv.dim() != 2 or recv.shape[1] != input.shape[1]:
        raise ArgumentError(
            f"{op}: input and recv must be (tokens, hidden) and (capacity, hidden), got {tuple(input.shape)} and "
            f"{tuple(recv.shape)}"
        )
    check_kind(op, "recv", recv, input)
    tokens, capacity = input.shape[0], recv.shape[0]
    if topk_ids.dim() != 2 or topk_ids.shape[0] != tokens or topk_ids.dtype not in _IDS:
        raise ArgumentError(
            f"{op}: topk_ids must be ({tokens}, topk) int64 or int32, got {tuple(topk_ids.shape)} {topk_ids.dtype}"
        )
    topk = topk_ids.shape[1]
    for name, tensor, shape, dtype in (
        ("topk_ids", topk_ids, (tokens, topk), topk_ids.dtype),
        ("topk_weights", topk_weights, (tokens, topk), torch.float32),
        ("recv_ids", recv_ids, (capacity, topk), topk_ids.dtype),
        ("recv_weights", recv_weights, (capacity, topk), torch.float32),
        ("recv_source", recv_source, (capacity, 2), torch.int32),
    ):
        _check(op, name, tensor, shape, dtype, input)
    for name, tensor in (
        *(("recv", recv), ("recv_ids", recv_ids), ("recv_weights", recv_weights), ("recv_source", recv_source)),
    ):
        check_written(op, name, tensor)


def check_combine(input: Tensor, recv_source: Tensor, tokens: int, ranks: int) -> None:
    """Raise `ArgumentError` for shapes, dtypes or devices that would make the result silently wrong."""
    op = "comm.combine"
    if input.dim() != 2 or ranks < 1 or tokens < 0:
        raise ArgumentError(
            f"{op}: input must be (capacity, hidden), ranks at least 1 and tokens at least 0: got "
            f"{tuple(input.shape)}, {ranks} and {tokens}"
        )
    _check(op, "recv_source", recv_source, (input.shape[0], 2), torch.int32, input)


def _check(op: str, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype:
        raise ArgumentError(f"{op}: {name} must be {shape} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
    if tensor.device != like.device:
        where = "CUDA device" if like.is_cuda else "device"
        raise ArgumentError(f"{op}: {name} must be on the same {where}, {like.device}: got {tensor.device}")


def process_group(op: str, ranks: int, group: str) -> tuple[Any, int]:
    """(process group, this rank in it); raises `ArgumentError` where there is none of that name and size."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        raise ArgumentError(
            f"{op}: {ranks} ranks need torch.distributed, which is not initialised in this process: call "
            "torch.distributed.init_process_group, or pass ranks=1"
        )
    if not group:
        found: Any = distributed.group.WORLD
    else:
        try:
            found = distributed.distributed_c10d._resolve_process_group(group)
        except (RuntimeError, ValueError, KeyError) as error:
            raise ArgumentError(f"{op}: no process group is called {group!r}: {error}") from None
    size = distributed.get_world_size(found)
    if size != ranks:
        raise ArgumentError(f"{op}: the process group {group or 'of all ranks'} has {size} ranks, not {ranks}")
    return found, distributed.get_rank(found)
