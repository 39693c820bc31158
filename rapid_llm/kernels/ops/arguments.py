"""What native rows ask of their tensors before they touch memory, and how strided tensors are seen by kernels.

Only checks that prevent a silently wrong result or a stray write are made here; each raises `ArgumentError`, naming the
op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod

import torch

from rapid_llm.kernels.registry import ArgumentError

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""A subclass, a fake tensor say, may hold no memory."""


def check_tensor(op: str, name: str, tensor: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless `tensor` has `shape` and `like`'s dtype and device."""
    if tensor.shape != shape:
        raise ArgumentError(f"{op}: {name} must have the same shape, {tuple(shape)}: got {tuple(tensor.shape)}")
    check_kind(op, name, tensor, like)


def check_kind(op: str, name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Raise unless `tensor` has `like`'s dtype and device."""
    if tensor.dtype is not like.dtype:
        raise ArgumentError(f"{op}: {name} must have dtype {like.dtype}, got {tensor.dtype}")
    if tensor.device != like.device:
        where = "CUDA device" if like.is_cuda else "device"
        raise ArgumentError(f"{op}: {name} must be on the same {where}, {like.device}: got {tensor.device}")


def check_host(op: str, *tensors: torch.Tensor) -> None:
    """Raise unless every tensor is plain CPU memory that C++ may read: on the CPU, allocated, without a lazy sign."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.is_neg() or (tensor.data_ptr() == 0 and tensor.numel() > 0):
            raise ArgumentError(
                f"{op}: needs plain tensors on the same device, cpu: got one on {tensor.device}"
                + (" with a lazy negation; call resolve_neg() first" if tensor.is_neg() else "")
                + (" without memory (a fake, functional or meta tensor)" if tensor.is_cpu else "")
            )


def check_dense(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise unless `tensor` is plain dense CUDA memory, whose address and size say it all."""
    if not tensor.is_cuda:
        raise ArgumentError(f"{op}: {name} must be a CUDA tensor, is on {tensor.device}")
    if type(tensor) not in _PLAIN:
        raise ArgumentError(f"{op}: needs plain CUDA tensors, {name} is a {type(tensor).__name__}")
    if tensor.is_neg():
        raise ArgumentError(f"{op}: {name} has a lazy negation; call resolve_neg() first")
    if not tensor.is_contiguous():
        raise ArgumentError(f"{op}: {name} must be contiguous; call .contiguous() first")


def check_written(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise if two elements of `tensor`, which the op writes, share memory (an expanded tensor, say)."""
    if tensor.is_contiguous():
        return
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    reach = 1
    for stride, size in dims:  # enough for the elements to be distinct, and exact for every view that slicing makes
        if size < 2:
            continue
        if stride < reach:
            raise ArgumentError(
                f"{op}: elements of {name} share memory (shape {tuple(tensor.shape)}, strides {tensor.stride()}); "
                "pass a tensor that is not expanded"
            )
        reach = stride * (size - 1) + reach


def check_disjoint(op: str, name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise if `tensor` and `other` may share an element; interleaved views of one buffer are told apart."""
    if overlaps(tensor, other):
        raise ArgumentError(f"{op}: {name} overlaps {other_name} in memory; pass separate tensors")


def check_alias(op: str, out: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
    """Raise if `out` shares memory with `tensor` otherwise than element by element."""
    if out is tensor or (out.data_ptr() == tensor.data_ptr() and out.stride() == tensor.stride()):
        return
    if overlaps(out, tensor):
        raise ArgumentError(f"{op}: out overlaps {name} in part; pass {name} itself or separate memory")


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may share memory: exact for dense ones and column slices of one buffer, else by extent."""
    start_a, start_b = a.data_ptr(), b.data_ptr()
    if a.is_contiguous() and b.is_contiguous():
        return -b.nbytes < start_b - start_a < a.nbytes
    end_a, end_b = start_a + _extent(a), start_b + _extent(b)
    if start_a >= end_b or start_b >= end_a:
        return False
    period = a.stride()[0] * a.element_size() if a.ndim > 1 else 0
    if a.ndim < 2 or b.ndim < 2 or b.stride()[0] * b.element_size() != period or period == 0:
        return True
    width_a, width_b = _extent(a[0]), _extent(b[0])
    shift = (start_b - start_a) % period
    return shift < width_a or shift + width_b > period


def token_strides(tensor: torch.Tensor, alone: int = 0) -> tuple[int, ...]:
    """`tensor`'s strides for a kernel; a single token's own, which may be anything, is `alone`.

    Triton compiles anew for a stride of another kind (1, divisible by 16, other), so a first batch of one token would
    otherwise compile what no other batch needs.
    """
    stride = tensor.stride()
    return stride if tensor.shape[0] != 1 else (alone, *stride[1:])


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to past the last one; 0 for an empty tensor."""
    if tensor.numel() == 0:
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def merge_dims(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """The fewest dimensions that walk tensors of one `shape` jointly: (size, stride, ...) each, outermost first.

    Dimensions of size 1 vanish and neighbours that every tensor steps through evenly become one; the order is that of
    the last tensor's memory. An empty list stands for a single element.
    """
    dims = [d for d in zip(shape, *strides, strict=True) if d[0] != 1]
    dims.sort(key=lambda d: d[:0:-1], reverse=True)
    merged = dims[:1]
    for outer, inner in pairwise(dims):
        if all(o == i * inner[0] for o, i in zip(outer[1:], inner[1:], strict=True)):
            merged[-1] = (merged[-1][0] * inner[0], *inner[1:])
        else:
            merged.append(inner)
    return merged


def walk(
    shape: Sequence[int], keep: int, *tensors: torch.Tensor
) -> Iterator[tuple[list[tuple[int, ...]], list[torch.Tensor]]]:
    """Cut a walk over `shape` into launches that count `keep` dimensions each: (dims, tensors to point with).

    `tensors` begin with the dimensions of `shape`; dims are (size, stride, ...) as of `merge_dims`, padded in front to
    `keep`. Nearly always one launch: more only where over `keep` dimensions cannot be merged. The tensors given back
    only carry an address, shifted to where the launch starts.
    """
    if 0 in shape:
        return
    dims = merge_dims(shape, *(t.stride()[: len(shape)] for t in tensors))
    outer, inner = dims[:-keep], dims[-keep:]
    inner = [(1, *(0 for _ in tensors))] * (keep - len(inner)) + inner
    for index in product(*(range(d[0]) for d in outer)):
        starts = (sum(i * d[n] for i, d in zip(index, outer, strict=True)) for n in range(1, len(tensors) + 1))
        yield inner, [_shifted(t, start) for t, start in zip(tensors, starts, strict=True)]


def _shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + elements) if elements else tensor


def walk_rows(*tensors: torch.Tensor) -> Iterator[tuple[int, int, list[int], list[torch.Tensor]]]:
    """Walk the rows, all dimensions but the last, of tensors of one leading shape: (rows, inner, strides, tensors).

    Row r is (r // inner, r % inner); strides hold, per tensor, the steps of these two and of the last dimension.
    """
    shape = tensors[0].shape[:-1]
    if all(t.is_contiguous() for t in tensors):
        rows = prod(shape)
        if rows:
            yield rows, 1, [n for t in tensors for n in (t.shape[-1], 0, 1)], list(tensors)
        return
    for (outer, inner), pointers in walk(shape, 2, *tensors):
        if outer[0] == 1:  # one dimension: let it be the outer one, so that no kernel divides by it
            outer, inner = inner, outer
        steps = [n for i, t in enumerate(tensors, 1) for n in (outer[i], inner[i], t.stride()[-1])]
        yield outer[0] * inner[0], inner[0], steps, pointers
