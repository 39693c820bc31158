"""What prefill and decode share on the host: argument checks, device facts, and a sequence's keys as plain tensors."""

from __future__ import annotations

import math
from typing import Final

import torch

from rapid_llm.kernels.ops import triton_support
from rapid_llm.kernels.ops.arguments import check_disjoint, check_tensor, check_written
from rapid_llm.kernels.ops.e4m3 import E4M3
from rapid_llm.kernels.ops.gemm.precision import rounds_fp32
from rapid_llm.kernels.registry import ArgumentError

LOG2_E: Final = 1.4426950408889634

INTERPRETER_MULTIPROCESSORS: Final = 4
"""Stands for the GPU's count where there is no GPU, so that split launches stay small enough to interpret."""

_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
_INTEGERS = frozenset((torch.int32, torch.int64))
_multiprocessors: dict[torch.device, int] = {}


def check_attention(
    op: str,
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
) -> None:
    """Raise `ArgumentError` for shapes, dtypes or devices that would make the result silently wrong."""
    dtype, device = query.dtype, query.device
    if dtype not in _DTYPES:
        raise ArgumentError(f"{op}: query has dtype {dtype}; use float32, float16 or bfloat16")
    kind = k_cache.dtype
    if kind != v_cache.dtype or (kind != dtype and kind is not E4M3):
        raise ArgumentError(
            f"{op}: query is {dtype}, the caches are {kind} and {v_cache.dtype}; use one dtype, or float8_e4m3fn caches"
        )
    shape, cache_shape = query.shape, k_cache.shape
    if len(shape) != 3 or len(cache_shape) != 4:
        raise ArgumentError(
            f"{op}: query must be (tokens, heads, head_dim) and the caches (pages, page_size, kv_heads, head_dim), "
            f"got {tuple(shape)} and {tuple(cache_shape)}"
        )
    if cache_shape[1] == 0:
        raise ArgumentError(f"{op}: pages hold no rows: caches are {tuple(cache_shape)}; use a page_size of at least 1")
    if v_cache.shape != cache_shape:
        raise ArgumentError(
            f"{op}: k_cache and v_cache must have the same shape: got {tuple(cache_shape)} and {tuple(v_cache.shape)}"
        )
    if shape[2] != cache_shape[3] or cache_shape[2] == 0 or shape[1] % cache_shape[2]:
        raise ArgumentError(
            f"{op}: query {tuple(shape)} does not fit caches {tuple(cache_shape)}: head_dim must be equal and the "
            "query heads a multiple of the kv heads"
        )
    sequences = seq_lens.shape[0]
    if seq_lens.ndim != 1 or block_table.ndim != 2 or block_table.shape[0] != sequences:
        raise ArgumentError(
            f"{op}: seq_lens must be (sequences,) and block_table (sequences, max_pages), "
            f"got {tuple(seq_lens.shape)} and {tuple(block_table.shape)}"
        )
    if seq_lens.dtype not in _INTEGERS or block_table.dtype not in _INTEGERS:
        raise ArgumentError(f"{op}: seq_lens is {seq_lens.dtype}, block_table {block_table.dtype}; use int32")
    for tensor in (k_cache, v_cache, seq_lens, block_table):
        if tensor.device != device:
            where = "CUDA device" if query.is_cuda else "device"
            raise ArgumentError(f"{op}: all tensors must be on the same {where}, {device}: got {tensor.device}")


def check_limits(op: str, window: int, softcap: float) -> None:
    """Raise `ArgumentError` for a window or a cap that means nothing."""
    if window < 0:
        raise ArgumentError(f"{op}: window is {window}; use the number of keys that a query sees, or 0 for all of them")
    if not (softcap >= 0 and math.isfinite(softcap)):
        raise ArgumentError(f"{op}: softcap is {softcap}; use a finite number above 0, or 0 for none")


def refuse_limits(row: str, window: int, softcap: float) -> None:
    """Raise `ArgumentError` where a row that has neither is given a window or a cap."""
    if window or softcap:
        raise ArgumentError(
            f"{row}: has no window and no softcap, got {window} and {softcap}; call the native row for them"
        )


def allocate(op: str, query: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The result tensor: `out` once checked, else new and contiguous."""
    if out is None:
        return torch.empty(query.shape, dtype=query.dtype, device=query.device)
    check_tensor(op, "out", out, query, query.shape)
    check_written(op, "out", out)
    check_disjoint(op, "out", out, "query", query)
    return out


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of `device`."""
    count = _multiprocessors.get(device)
    if count is None:
        if device.type != "cuda":
            return INTERPRETER_MULTIPROCESSORS
        count = torch.cuda.get_device_properties(device).multi_processor_count
        if device.index is not None:  # a bare "cuda" means whichever device is current
            _multiprocessors[device] = count
    return count


def probability_parts(dtype: torch.dtype) -> dict[str, int]:
    """How `attend_block` multiplies probabilities by values of `dtype`."""
    if dtype == torch.float32 or (dtype == torch.bfloat16 and triton_support.INTERPRETED):
        return {"PARTS": 0, "SHIFT": 0}  # the interpreter's bf16 products are wrong
    return {"PARTS": 3, "SHIFT": 0} if dtype == torch.bfloat16 else {"PARTS": 2, "SHIFT": 15}


def loops_by_while() -> bool:
    """Triton 3.6's interpreter under numpy 2.4 or later refuses ranges with bounds that are known only at run time."""
    if not triton_support.INTERPRETED:
        return False
    return tuple(int(part) for part in triton_support.triton.__version__.split(".")[:2]) < (3, 7)


def sequence_heads(
    op: str,
    sequence: int,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    pages: list[int],
    length: int,
    start: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values from position `start` of one sequence on, each (1, kv_heads, length - start, head_dim): views
    where its pages are consecutive.

    pages: its row of block_table, as far as `length` > 0 keys need it. Raises `ArgumentError` where these are too few,
    or where those from `start` on do not exist.
    """
    count, page_size = k_cache.shape[:2]
    if length > len(pages) * page_size:
        raise ArgumentError(
            f"{op}: sequence {sequence} has {length} keys, its block_table row {len(pages)} pages of {page_size}"
        )
    skipped, start = divmod(start, page_size)
    pages, length = pages[skipped:], length - skipped * page_size
    first, last = pages[0], pages[0] + len(pages) - 1
    in_a_row = pages[-1] == last and pages == list(range(first, last + 1))
    if not in_a_row:
        first, last = min(pages), max(pages)
    if first < 0 or last >= count:
        raise ArgumentError(
            f"{op}: the block table of sequence {sequence} names pages {first} to {last}; "
            f"the cache has pages 0 to {count - 1}"
        )
    if in_a_row:
        keys, values = _rows_in_place(k_cache, first, length), _rows_in_place(v_cache, first, length)
        if keys is not None and values is not None:
            return (keys[:, :, start:], values[:, :, start:]) if start else (keys, values)
    index = block_table[sequence, skipped : skipped + len(pages)]
    keys, values = _gathered_rows(k_cache, index, length), _gathered_rows(v_cache, index, length)
    return (keys[:, :, start:], values[:, :, start:]) if start else (keys, values)


def _rows_in_place(cache: torch.Tensor, first: int, length: int) -> torch.Tensor | None:
    """A view from page `first` on, if the step from page to page continues the step from row to row."""
    _, page_size, heads, dim = cache.shape
    page_stride, row_stride, head_stride, dim_stride = cache.stride()
    if page_stride != page_size * row_stride:
        return None
    start = cache.storage_offset() + first * page_stride
    return cache.as_strided((1, heads, length, dim), (0, head_stride, row_stride, dim_stride), start)


def _gathered_rows(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    return cache.index_select(0, pages).flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)


def attend_exactly(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Attention in fp64, where neither TF32 nor a fused kernel's choices can enter; the answer where Triton is absent.

    query: (batch, heads, rows, dim); keys, values: (batch, kv_heads, length, dim); hidden: bool, broadcastable to
    (batch, kv_heads, group, rows, length), True where a query must not look. Rows that see nothing give zeros. dtype:
    of the arithmetic and of the result, which has query's shape.
    """
    batch, heads, rows, dim = query.shape
    kv_heads, length = keys.shape[1:3]
    grouped = query.to(dtype).reshape(batch, kv_heads, heads // kv_heads * rows, dim)
    scores = (grouped @ keys.to(dtype).transpose(2, 3) * scale).view(batch, kv_heads, -1, rows, length)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, -1).masked_fill(hidden.expand_as(scores).all(-1, keepdim=True), 0.0)
    return (weights.view(batch, kv_heads, -1, length) @ values.to(dtype)).view(batch, heads, rows, dim)


def attend_capped(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """`attend_exactly` of fp32 tensors in fp32, which torch's fused attention has no cap for; fp32 of query's shape."""
    wide = torch.float64 if rounds_fp32(query) else torch.float32
    return attend_exactly(query, keys, values, hidden, scale, softcap, wide).float()
