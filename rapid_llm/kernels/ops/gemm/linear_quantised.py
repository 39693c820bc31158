"""Triton kernels of `linear` that read GGUF blocks as they lie in memory and dequantise them in registers.

Codes are loaded in words, each of which holds several weights; `_column` tells where weight s of a word belongs. For
few rows of input words are as wide as the blocks' alignment allows: 4 bytes for q4_1 (20-byte blocks), 2 for q4_0 and
q8_0 (18 and 34), 1 where the tensor itself is misaligned or strided. For more rows they are single bytes, so that the
columns of the input that a load takes are adjacent. Above `TILE_ROWS` rows it pays to write the dense weight out once,
a bounded piece at a time, and to multiply that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rapid_llm.kernels.ops.arguments import walk_rows
from rapid_llm.kernels.ops.block_formats import BLOCK_BYTES
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles
from rapid_llm.kernels.ops.triton_support import launch, tl, triton

GEMV_ROWS = 4
"""Up to so many rows of input, each row reads and decodes the weight by itself, and keeps it in fp32."""

TILE_ROWS = 16
"""Above, decoding once into memory and reading that costs less than decoding in every program."""

PIECE = 2**26
"""Weights written out at a time: 128 MiB in 16 bits."""

Dense = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
"""Launches input @ weight.T + bias into out, for a dense weight."""


@triton.jit
def _half_at(ptr, step, mask, ALIGNED: tl.constexpr):
    """A little-endian fp16 as fp32; unless ALIGNED, at any byte address."""
    if ALIGNED:
        value = tl.load(ptr.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0)
    else:
        low = tl.load(ptr, mask=mask, other=0).to(tl.uint16)
        high = tl.load(ptr + step, mask=mask, other=0).to(tl.uint16)
        value = (low | (high << 8)).to(tl.float16, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _word_at(ptr, mask, WORD: tl.constexpr):
    """WORD bytes as int32, the first lowest."""
    if WORD == 4:
        word = tl.load(ptr.to(tl.pointer_type(tl.int32)), mask=mask, other=0)
    elif WORD == 2:
        word = tl.load(ptr.to(tl.pointer_type(tl.uint16)), mask=mask, other=0).to(tl.int32)
    else:
        word = tl.load(ptr, mask=mask, other=0).to(tl.int32)
    return word


@triton.jit
def _parts_at(row_ptr, word, step, mask, SCHEME: tl.constexpr, WORD: tl.constexpr, ALIGNED: tl.constexpr):
    """(codes, d, m) of a word of a row, counted from the row's start. m is 0 but for q4_1; masked ones are 0."""
    BYTES: tl.constexpr = 34 if SCHEME == "q8_0" else (18 if SCHEME == "q4_0" else 20)
    CODES: tl.constexpr = 32 if SCHEME == "q8_0" else 16
    PER_BLOCK: tl.constexpr = CODES // WORD
    block = row_ptr + word // PER_BLOCK * BYTES * step
    codes = _word_at(block + (BYTES - CODES + word % PER_BLOCK * WORD) * step, mask, WORD)
    d = _half_at(block, step, mask, ALIGNED)
    m = d
    if SCHEME == "q4_1":
        m = _half_at(block + 2 * step, step, mask, ALIGNED)
    return codes, d, m


@triton.jit
def _weight(codes, d, m, s: tl.constexpr, SCHEME: tl.constexpr):
    """Weight s of a word, in fp32."""
    if SCHEME == "q8_0":
        value = ((codes << (24 - 8 * s)) >> 24).to(tl.float32) * d
    elif SCHEME == "q4_0":
        value = (((codes >> (4 * s)) & 15) - 8).to(tl.float32) * d
    else:
        value = ((codes >> (4 * s)) & 15).to(tl.float32) * d + m
    return value


@triton.jit
def _column(word, s: tl.constexpr, SCHEME: tl.constexpr, WORD: tl.constexpr):
    """The column of weight s of a word: low nibbles are weights 0 to 15 of a block, high nibbles 16 to 31."""
    if SCHEME == "q8_0":
        column = word * WORD + s
    else:
        column = word // (16 // WORD) * 32 + word % (16 // WORD) * WORD + s // 2 + s % 2 * 16
    return column.to(tl.int64)


@triton.jit(do_not_specialize=["rows", "inner"])
def _gemv_blocks_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, rows, inner, outputs, words, x_outer, x_inner, x_col, y_outer, y_inner, y_col, w_row,
    w_col, b_step, HAS_BIAS: tl.constexpr, SCHEME: tl.constexpr, ALIGNED: tl.constexpr, WORD: tl.constexpr,
    EACH: tl.constexpr, STEPS: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """One row of input times BN rows of the weight; programs that share weights are neighbours."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid % rows
    n = pid // rows * BN + tl.arange(0, BN)
    x_ptr += row // inner * x_outer + row % inner * x_inner
    w_rows = w_ptr + (n * w_row)[:, None]
    acc = tl.zeros((BN, BW), tl.float32)
    for step in range(STEPS):
        word = step * BW + tl.arange(0, BW)
        inside = (n < outputs)[:, None] & (word < words)[None, :]
        codes, d, m = _parts_at(w_rows, word[None, :], w_col, inside, SCHEME, WORD, ALIGNED)
        for s in tl.static_range(EACH):
            x = tl.load(x_ptr + _column(word, s, SCHEME, WORD) * x_col, mask=word < words, other=0.0).to(tl.float32)
            acc += _weight(codes, d, m, s, SCHEME) * x[None, :]
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(b_ptr + n * b_step, mask=n < outputs, other=0.0).to(tl.float32)
    y_ptr += row // inner * y_outer + row % inner * y_inner
    tl.store(y_ptr + n * y_col, y.to(y_ptr.dtype.element_ty), mask=n < outputs)


@triton.jit(do_not_specialize=["rows", "inner"])
def _tile_blocks_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, rows, inner, outputs, words, x_outer, x_inner, x_col, y_outer, y_inner, y_col, w_row,
    w_col, b_step, HAS_BIAS: tl.constexpr, SCHEME: tl.constexpr, ALIGNED: tl.constexpr, WORD: tl.constexpr,
    EACH: tl.constexpr, STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """BM rows of input times BN rows of the weight; programs that share weights are neighbours."""
    pid = tl.program_id(0).to(tl.int64)
    bands = tl.cdiv(rows, BM)
    m = pid % bands * BM + tl.arange(0, BM)
    n = pid // bands * BN + tl.arange(0, BN)
    x_rows = x_ptr + (m // inner * x_outer + m % inner * x_inner)[:, None]
    w_rows = w_ptr + (n * w_row)[None, :]
    dtype = x_ptr.dtype.element_ty
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(STEPS):
        word = step * BW + tl.arange(0, BW)
        taken = (m < rows)[:, None] & (word < words)[None, :]
        inside = (word < words)[:, None] & (n < outputs)[None, :]
        codes, d, offset = _parts_at(w_rows, word[:, None], w_col, inside, SCHEME, WORD, ALIGNED)
        for s in tl.static_range(EACH):
            x = tl.load(x_rows + (_column(word, s, SCHEME, WORD) * x_col)[None, :], mask=taken, other=0.0)
            acc = tl.dot(x, _weight(codes, d, offset, s, SCHEME).to(dtype), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(b_ptr + n * b_step, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    y_rows = y_ptr + (m // inner * y_outer + m % inner * y_inner)[:, None]
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(y_rows + n[None, :] * y_col, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _write_kernel(
    w_ptr, out_ptr, outputs, words, w_row, w_col, out_row, SCHEME: tl.constexpr, ALIGNED: tl.constexpr,
    WORD: tl.constexpr, EACH: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """BN by BW words of a weight, dequantised."""
    parts = tl.cdiv(words, BW)
    pid = tl.program_id(0).to(tl.int64)
    n = pid // parts * BN + tl.arange(0, BN)
    word = pid % parts * BW + tl.arange(0, BW)
    inside = (n < outputs)[:, None] & (word < words)[None, :]
    codes, d, m = _parts_at(w_ptr + (n * w_row)[:, None], word[None, :], w_col, inside, SCHEME, WORD, ALIGNED)
    out_rows = out_ptr + (n * out_row)[:, None]
    for s in tl.static_range(EACH):
        value = _weight(codes, d, m, s, SCHEME).to(out_ptr.dtype.element_ty)
        tl.store(out_rows + _column(word, s, SCHEME, WORD)[None, :], value, mask=inside)


@tiles("linear_blocks")
def _tiles(sm: int, *, rows: int, words: int, each: int, itemsize: int) -> Mapping[str, int]:
    if rows <= GEMV_ROWS:
        block = 128 if -(-words // 128) * 2 <= -(-words // 64) else 64
        return {"BN": 4, "BW": block, "num_warps": 2}
    if itemsize == 4:  # no tensor cores in IEEE fp32: registers bound the tile
        return {"BM": 16, "BN": 64, "BW": 16, "num_warps": 4, "num_stages": 2}
    if each == 1:
        return {"BM": 16, "BN": 16, "BW": 128, "num_warps": 4, "num_stages": 3}
    return {"BM": 16, "BN": 32, "BW": 64, "num_warps": 4, "num_stages": 3}


def launch_blocks(input: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, scheme: str, dense: Dense) -> None:
    """Launch over every row of `input`; arguments are checked. `dense` multiplies a weight that was written out."""
    outputs, features = weight.shape[0], input.shape[-1]
    if out.numel() > TILE_ROWS * outputs and features:
        _write_and_multiply(input, weight, bias, out, scheme, dense)
        return
    few = out.numel() <= GEMV_ROWS * outputs
    words, widths = _words(weight, scheme, features, wide=few)
    for rows, inner, strides, (x, y) in walk_rows(input, out):
        meta = resolve_tiles(
            "linear_blocks", input.device, rows=next_power_of_2(rows), words=words, each=widths["EACH"],
            itemsize=input.element_size(),
        )  # fmt: skip
        kernel = _tile_blocks_kernel if "BM" in meta else _gemv_blocks_kernel
        grid = -(-outputs // meta["BN"]) * -(-rows // meta.get("BM", 1))
        launch(
            kernel, (grid,), input.device, x, y, weight, bias, rows, inner, outputs, words, *strides,
            *weight.stride(), bias.stride(0) if bias is not None else 0, HAS_BIAS=bias is not None, SCHEME=scheme,
            STEPS=-(-words // meta["BW"]), **widths, **meta,
        )  # fmt: skip


def _words(weight: Tensor, scheme: str, features: int, *, wide: bool) -> tuple[int, dict[str, int]]:
    """Words in a row, and what kernels know of a word; `wide`: as many bytes as the alignment allows, else one."""
    w_row, w_col = weight.stride()
    address = weight.data_ptr() | w_row | BLOCK_BYTES[scheme]
    aligned = w_col == 1 and address % 2 == 0
    width = 1
    if wide and aligned:
        width = 4 if address % 4 == 0 else 2
    each = width if scheme == "q8_0" else 2 * width
    return features // each, {"ALIGNED": aligned, "WORD": width, "EACH": each}


def _write_and_multiply(
    input: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, scheme: str, dense: Dense
) -> None:
    outputs, features = weight.shape[0], input.shape[-1]
    words, widths = _words(weight, scheme, features, wide=False)
    count = min(outputs, max(1, PIECE // features))
    scratch = torch.empty((count, features), dtype=input.dtype, device=input.device)
    meta = resolve_tiles("linear_write", input.device, words=words)
    for first in range(0, outputs, count):
        part = weight[first : first + count]
        rows = part.shape[0]
        grid = -(-rows // meta["BN"]) * -(-words // meta["BW"])
        launch(
            _write_kernel, (grid,), input.device, part, scratch, rows, words, *part.stride(), features,
            SCHEME=scheme, **widths, **meta,
        )  # fmt: skip
        taken = None if bias is None else bias[first : first + count]
        dense(input, scratch[:rows], taken, out[..., first : first + count])


@tiles("linear_write")
def _write_tiles(sm: int, *, words: int) -> Mapping[str, int]:
    block = min(next_power_of_2(words), 1024)
    return {"BN": 1024 // block, "BW": block, "num_warps": 4}
