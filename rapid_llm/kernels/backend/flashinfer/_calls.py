"""What the adapters share: memory as flashinfer demands it, the current device, and first uses."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.build.freezing import check_thawed
from rapid_llm.kernels.ops.arguments import overlaps
from rapid_llm.kernels.registry import ArgumentError, NotReadyError

ALIGNMENT: Final = 128
"""Bytes: flashinfer's CuTe kernels are compiled for addresses as aligned as their rows are long, at most this much."""

_used: Final[set[Hashable]] = set()


def check_rows(op: str, name: str, tensor: Tensor) -> None:
    """Raise `ArgumentError` unless the last dimension is dense and every row starts on a 16-byte boundary.

    The rows declare this to dispatch; a handle bound for other tensors would otherwise read beside them.
    """
    if tensor.numel() == 0:
        return
    size, strides = tensor.element_size(), tensor.stride()
    dense = tensor.shape[-1] == 1 or strides[-1] == 1
    if not dense or tensor.data_ptr() % 16 or any(stride * size % 16 for stride in strides[:-1]):
        raise ArgumentError(
            f"{op}: flashinfer needs {name} dense in its last dimension, with rows on 16-byte boundaries: "
            f"got {tuple(tensor.shape)} with strides {strides} at an address that leaves {tensor.data_ptr() % 16}"
        )


def aligned(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it where its address is not a multiple of `ALIGNMENT`."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone(memory_format=torch.contiguous_format)


def direct(out: Tensor | None, *inputs: Tensor) -> Tensor | None:
    """`out` if a kernel may write there at once: dense, aligned, and no part of an input; else None."""
    if out is None or not out.is_contiguous() or out.data_ptr() % ALIGNMENT:
        return None
    return None if any(overlaps(out, tensor) for tensor in inputs) else out


def deliver(result: Tensor, out: Tensor | None) -> Tensor:
    """The row's answer: `result`, or `out` holding it."""
    return result if out is None or out is result else out.copy_(result)


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Keeps the current device, which some of flashinfer's launchers change, and makes it `tensor`'s meanwhile."""
    if not tensor.is_cuda or torch.cuda.current_device() == tensor.device.index:
        return nullcontext()
    return torch.cuda.device(tensor.device)


def first_use(*key: Hashable) -> None:
    """Raise `NotReadyError` where the first use of a kernel, which builds it, comes while kernels are frozen or a CUDA
    graph is captured."""
    if key in _used:
        return
    check_thawed(f"flashinfer's {key[0]}")
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise NotReadyError(
            f"flashinfer builds {key[0]} on its first use, which a CUDA graph capture does not allow: "
            "prepare() it, or call it once with these shapes, before the capture"
        )
    _used.add(key)
