"""Faults of kernels on rows of whole vectors: rows that lie apart, and rows so many that blocks of another shape run.

A kernel's wide path reads strides of its own, and its blocks for many rows count rows of their own; nothing that its
narrow path does shows a fault in either. Where such a path would not run, the wrong rows made here are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels.registry import OpSpec

Fn = Callable[..., Any]

VECTOR: Final = 16
"""Bytes that a thread of a wide path loads at once."""

FEW: Final = 264
"""Rows up to which a block takes one; up to four times as many it takes four, then eight."""

SPACED, OTHER_SPACED = "rows taken for evenly spaced", "other rows taken for evenly spaced"
MANY = "last of many rows unwritten"

_ROWS: Final = (SPACED, OTHER_SPACED, MANY)
FAULTS: Final = {
    "scale": (SPACED, OTHER_SPACED),
    **dict.fromkeys(
        ("silu_and_mul", "gelu_and_mul", "rmsnorm", "fused_add_rmsnorm", "rope", "rope_kvcache_write", "linear"), _ROWS
    ),
}
"""Which of them the cases of an op must show."""


def wrapped(op: OpSpec, fault: str, fn: Fn) -> Fn:
    """`fn`, which is a right row of `op`, with the fault."""

    def with_result(*args: Any, out: Tensor | None = None, **keywords: Any) -> Tensor:
        if fault == SPACED:
            args = (_evenly(args[0]), *args[1:])
        before = None if out is None else out.clone()
        target = _evenly(out) if out is not None and fault == OTHER_SPACED else out
        result: Tensor = fn(*args, out=target, **keywords)
        if fault == MANY:
            _last_kept(result, torch.empty_like(result) if before is None else before)
        return result if out is None else out

    def in_place(first: Tensor, second: Tensor, *args: Any, **keywords: Any) -> None:
        if fault == MANY:
            before = first.clone(), second.clone()
            fn(first, second, *args, **keywords)
            _last_kept(first, before[0])
            _last_kept(second, before[1])
        elif fault == SPACED:
            fn(_evenly(first), second, *args, **keywords)
        else:
            fn(first, _evenly(second), *args, **keywords)

    run = with_result if op.parsed.takes_out else in_place
    run.__name__ = f"{op.function} ({fault})"
    return run


def _evenly(tensor: Tensor) -> Tensor:
    """The memory of `tensor` with all rows as far apart as two neighbours; itself where a narrow path would run, or
    where that would leave its storage."""
    size, strides = tensor.element_size(), list(tensor.stride())
    if tensor.dim() < 3 or tensor.numel() == 0 or strides[-1] != 1:
        return tensor
    if any(n * size % VECTOR for n in (tensor.shape[-1], *strides[:-1])) or tensor.data_ptr() % VECTOR:
        return tensor
    for dim in range(tensor.dim() - 3, -1, -1):
        strides[dim] = tensor.shape[dim + 1] * strides[dim + 1]
    reach = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    if (reach + 1) * size > tensor.untyped_storage().nbytes():
        return tensor
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


def _last_kept(now: Tensor, before: Tensor) -> None:
    """Undo what was written into the rows of a last block that is not full."""
    lead = now.shape[:-1]
    count = math.prod(lead)
    if count <= FEW:
        return
    together = 4 if count <= 4 * FEW else 8
    for row in range(count // together * together, count):
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(row), lead))
        now[at] = before[at]
