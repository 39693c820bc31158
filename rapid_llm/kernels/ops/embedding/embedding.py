"""Native `embedding`: rows of a dense table, or of a quantised one, dequantised on the way.

Triton has dense tables and GGUF's simplest blocks; rows of other schemes are gathered and dequantised by PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rapid_llm.kernels.ops.arguments import check_disjoint, check_written, walk
from rapid_llm.kernels.ops.block_formats import BLOCK_BYTES, FORMATS, FP8, row_elements
from rapid_llm.kernels.ops.gemm.dequantise import dequantise
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles, warps_for
from rapid_llm.kernels.ops.triton_support import attempt, launch, tl, triton, use_triton
from rapid_llm.kernels.registry import ArgumentError

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    scheme: str = "unquantized",
) -> torch.Tensor:
    """Rows of `weight` by token id. See `rapid_llm.kernels.embedding`."""
    dense = scheme == "unquantized"
    hidden = _check(input, weight, scheme, dense)
    if dtype is None:
        dtype = weight.dtype if dense else torch.float32
    shape = (*input.shape, hidden)
    if out is not None:
        if out.shape != shape or out.dtype != dtype or out.device != weight.device:
            raise ArgumentError(
                f"embedding: out must have the same shape, dtype and device as the result, {shape} {dtype} on "
                f"{weight.device}: got {tuple(out.shape)} {out.dtype} on {out.device}"
            )
        check_written("embedding", "out", out)
        check_disjoint("embedding", "out", out, "weight", weight)
    if (dense or scheme in BLOCK_BYTES) and use_triton("embedding", weight):
        result = torch.empty(shape, dtype=dtype, device=weight.device) if out is None else out
        if attempt("embedding", _launch, input, weight, result, scheme):
            return result
    rows = _gather(input, weight)
    if not dense:
        rows = dequantise(rows.view(-1, rows.shape[-1]), scheme)
    rows = rows.view(shape)
    return rows.to(dtype) if out is None else out.copy_(rows)


def _check(input: torch.Tensor, weight: torch.Tensor, scheme: str, dense: bool) -> int:
    """The width of a row of the result."""
    if input.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(f"embedding: input holds token ids and must be int32 or int64, got {input.dtype}")
    if input.device != weight.device:
        raise ArgumentError(
            f"embedding: input is on {input.device}, weight on {weight.device}; CUDA and CPU do not mix"
        )
    if weight.dim() != 2:
        raise ArgumentError(f"embedding: weight must be two-dimensional, got shape {tuple(weight.shape)}")
    if dense:
        if weight.dtype not in _FLOATS:
            raise ArgumentError(f"embedding: scheme 'unquantized' takes float weights, got {weight.dtype}")
        return weight.shape[1]
    if scheme not in FORMATS or scheme == FP8 or weight.dtype is not torch.uint8:
        known = ", ".join(("unquantized", *(name for name in FORMATS if name != FP8)))
        raise ArgumentError(f"embedding: scheme {scheme!r} over {weight.dtype}; known: {known}, quantised over uint8")
    return row_elements(weight.shape[1], scheme)


def _gather(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(*ids.shape, columns), a new tensor. An id outside raises IndexError on the CPU and gives zeros on CUDA."""
    return _gather_known(ids, weight) if weight.is_cuda else torch.embedding(weight, ids)


def _gather_known(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """On CUDA without Triton: no host read, so a graph may capture it."""
    vocab = weight.shape[0]
    if not vocab:
        return weight.new_zeros((*ids.shape, weight.shape[1]))
    known = (ids >= 0) & (ids < vocab)
    return torch.embedding(weight, ids.clamp(0, vocab - 1)).masked_fill_(~known.unsqueeze(-1), 0)


@tiles("embedding")
def _tiles(sm: int, *, hidden: int, itemsize: int) -> Mapping[str, int]:
    block = min(next_power_of_2(hidden), 128 * 16 // itemsize)
    return {"COLUMNS": block, "num_warps": warps_for(block, per_thread=16 // itemsize)}


@triton.jit
def _half_at(ptr, mask):
    """A little-endian fp16 at any byte address."""
    low = tl.load(ptr, mask=mask, other=0).to(tl.uint16)
    high = tl.load(ptr + 1, mask=mask, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _load_row(row_ptr, col, mask, step, SCHEME: tl.constexpr):
    if SCHEME == "unquantized":
        value = tl.load(row_ptr + col * step, mask=mask, other=0.0)  # as it is: where no cast is asked for, every bit
    elif SCHEME == "q8_0":
        block = row_ptr + col // 32 * 34
        q = tl.load(block + 2 + col % 32, mask=mask, other=0).to(tl.int8, bitcast=True)
        value = q.to(tl.float32) * _half_at(block, mask)
    else:
        BYTES: tl.constexpr = 18 if SCHEME == "q4_0" else 20
        block = row_ptr + col // 32 * BYTES
        byte = tl.load(block + BYTES - 16 + col % 16, mask=mask, other=0).to(tl.int32)
        q = (byte >> (col % 32 // 16 * 4).to(tl.int32)) & 15
        if SCHEME == "q4_0":
            value = (q - 8).to(tl.float32) * _half_at(block, mask)
        else:
            value = q.to(tl.float32) * _half_at(block, mask) + _half_at(block + 2, mask)
    return value


@triton.jit
def _embedding_kernel(
    id_ptr, out_ptr, weight_ptr, vocab, hidden, inner, id_outer, id_inner, out_outer, out_inner, out_step,
    weight_row, weight_step, SCHEME: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(id_ptr + token // inner * id_outer + token % inner * id_inner).to(tl.int64)
    out_ptr += token // inner * out_outer + token % inner * out_inner
    col = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    known = (col < hidden) & (row >= 0) & (row < vocab)
    value = _load_row(weight_ptr + row * weight_row, col, known, weight_step, SCHEME)
    tl.store(out_ptr + col * out_step, value.to(out_ptr.dtype.element_ty), mask=col < hidden)


def _launch(input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scheme: str) -> None:
    hidden = out.shape[-1]
    meta = resolve_tiles("embedding", weight.device, hidden=hidden, itemsize=out.element_size())
    blocks = -(-hidden // meta["COLUMNS"])
    for (outer, inner), (ids, rows) in walk(input.shape, 2, input, out):
        if outer[0] == 1:
            outer, inner = inner, outer
        id_step = outer[1] if outer[0] > 1 else 1  # as for several, so that one token needs no compilation of its own
        args = (ids, rows, weight, weight.shape[0], hidden, inner[0], id_step, inner[1], outer[2], inner[2])
        launch(
            _embedding_kernel, (outer[0] * inner[0], blocks), weight.device,
            *args, out.stride()[-1], *weight.stride(), SCHEME=scheme, **meta,
        )  # fmt: skip
