"""Triton kernels of `linear` that read GGUF blocks as they lie in memory and dequantise them in registers.

A block holds weight i and weight i + 16 in one byte (or 16 bytes apart), so kernels walk half columns: for each, one
load of codes serves two weights, and two columns of the input.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rapid_llm.kernels.ops.arguments import walk_rows
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles
from rapid_llm.kernels.ops.triton_support import launch, tl, triton

GEMV_ROWS = 4


@triton.jit
def _half_at(ptr, step, mask, ALIGNED: tl.constexpr):
    """A little-endian fp16 at any byte address, as fp32; ALIGNED: the address is even and bytes are adjacent."""
    if ALIGNED:
        value = tl.load(ptr.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0)
    else:
        low = tl.load(ptr, mask=mask, other=0).to(tl.uint16)
        high = tl.load(ptr + step, mask=mask, other=0).to(tl.uint16)
        value = (low | (high << 8)).to(tl.float16, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _pair_at(row_ptr, half, step, mask, SCHEME: tl.constexpr, ALIGNED: tl.constexpr):
    """Weights (half // 16, half % 16) and the one 16 further on in the same block, in fp32. Masked ones are 0."""
    BYTES: tl.constexpr = 34 if SCHEME == "q8_0" else (18 if SCHEME == "q4_0" else 20)
    block = row_ptr + half // 16 * BYTES * step
    d = _half_at(block, step, mask, ALIGNED)
    if SCHEME == "q8_0":
        codes = block + (2 + half % 16) * step
        low = tl.load(codes, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32) * d
        high = tl.load(codes + 16 * step, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32) * d
    else:
        byte = tl.load(block + (BYTES - 16 + half % 16) * step, mask=mask, other=0).to(tl.int32)
        low = byte & 15
        high = byte >> 4
        if SCHEME == "q4_0":
            low = (low - 8).to(tl.float32) * d
            high = (high - 8).to(tl.float32) * d
        else:
            m = _half_at(block + 2 * step, step, mask, ALIGNED)
            low = low.to(tl.float32) * d + m
            high = high.to(tl.float32) * d + m
    return low, high


@triton.jit(do_not_specialize=["rows", "inner"])
def _gemv_blocks_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, rows, inner, outputs, halves, x_outer, x_inner, x_col, y_outer, y_inner, y_col, w_row,
    w_col, b_step, HAS_BIAS: tl.constexpr, SCHEME: tl.constexpr, ALIGNED: tl.constexpr, STEPS: tl.constexpr,
    BN: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """One row of input times BN rows of the weight; programs that share weights are neighbours."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid % rows
    n = pid // rows * BN + tl.arange(0, BN)
    x_ptr += row // inner * x_outer + row % inner * x_inner
    acc = tl.zeros((BN, BH), tl.float32)
    for step in range(STEPS):
        half = (step * BH + tl.arange(0, BH)).to(tl.int64)
        column = x_ptr + (half // 16 * 32 + half % 16) * x_col
        x_low = tl.load(column, mask=half < halves, other=0.0).to(tl.float32)
        x_high = tl.load(column + 16 * x_col, mask=half < halves, other=0.0).to(tl.float32)
        inside = (n < outputs)[:, None] & (half < halves)[None, :]
        low, high = _pair_at(w_ptr + n[:, None] * w_row, half[None, :], w_col, inside, SCHEME, ALIGNED)
        acc += low * x_low[None, :] + high * x_high[None, :]
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(b_ptr + n * b_step, mask=n < outputs, other=0.0).to(tl.float32)
    y_ptr += row // inner * y_outer + row % inner * y_inner
    tl.store(y_ptr + n * y_col, y.to(y_ptr.dtype.element_ty), mask=n < outputs)


@triton.jit(do_not_specialize=["rows", "inner"])
def _tile_blocks_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, rows, inner, outputs, halves, x_outer, x_inner, x_col, y_outer, y_inner, y_col, w_row,
    w_col, b_step, HAS_BIAS: tl.constexpr, SCHEME: tl.constexpr, ALIGNED: tl.constexpr, STEPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr,
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
        half = (step * BH + tl.arange(0, BH)).to(tl.int64)
        column = x_rows + ((half // 16 * 32 + half % 16) * x_col)[None, :]
        taken = (m < rows)[:, None] & (half < halves)[None, :]
        x_low = tl.load(column, mask=taken, other=0.0)
        x_high = tl.load(column + 16 * x_col, mask=taken, other=0.0)
        inside = (half < halves)[:, None] & (n < outputs)[None, :]
        low, high = _pair_at(w_rows, half[:, None], w_col, inside, SCHEME, ALIGNED)
        acc = tl.dot(x_low, low.to(dtype), acc, input_precision="ieee")
        acc = tl.dot(x_high, high.to(dtype), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(b_ptr + n * b_step, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    y_rows = y_ptr + (m // inner * y_outer + m % inner * y_inner)[:, None]
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(y_rows + n[None, :] * y_col, acc.to(y_ptr.dtype.element_ty), mask=inside)


@tiles("linear_blocks")
def _tiles(sm: int, *, rows: int, outputs: int, halves: int, itemsize: int) -> Mapping[str, int]:
    if rows <= GEMV_ROWS:
        return {"BN": 4 if outputs < 8192 else 8, "BH": min(next_power_of_2(halves), 256), "num_warps": 4}
    if itemsize == 4:  # no tensor cores in IEEE fp32: registers bound the tile
        return {"BM": 16 if rows <= 16 else 64, "BN": 64, "BH": 16, "num_warps": 4, "num_stages": 2}
    if rows <= 32:
        return {"BM": 16 if rows <= 16 else 32, "BN": 32, "BH": 64, "num_warps": 4, "num_stages": 3}
    if rows <= 64:
        return {"BM": 64, "BN": 64, "BH": 32, "num_warps": 4, "num_stages": 3}
    return {"BM": 128, "BN": 64, "BH": 32, "num_warps": 8, "num_stages": 3}


def launch_blocks(input: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, scheme: str) -> None:
    """Launch over every row of `input`; arguments are checked."""
    outputs, halves = weight.shape[0], input.shape[-1] // 2
    w_row, w_col = weight.stride()
    # Every format's block has an even number of bytes.
    aligned = w_col == 1 and w_row % 2 == 0 and weight.data_ptr() % 2 == 0
    for rows, inner, strides, (x, y) in walk_rows(input, out):
        meta = resolve_tiles(
            "linear_blocks", input.device, rows=next_power_of_2(rows), outputs=outputs, halves=halves,
            itemsize=input.element_size(),
        )  # fmt: skip
        kernel = _tile_blocks_kernel if "BM" in meta else _gemv_blocks_kernel
        grid = -(-outputs // meta["BN"]) * -(-rows // meta.get("BM", 1))
        launch(
            kernel, (grid,), input.device, x, y, weight, bias, rows, inner, outputs, halves, *strides, w_row, w_col,
            bias.stride(0) if bias is not None else 0, HAS_BIAS=bias is not None, SCHEME=scheme, ALIGNED=aligned,
            STEPS=-(-halves // meta["BH"]), **meta,
        )  # fmt: skip
