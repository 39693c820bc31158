"""Triton kernels of `linear` over weights of scheme `fp8_block128`, decoded in registers.

e4m3 is decoded with integers: its seven low bits, moved to where fp16 keeps exponent and fraction, make an fp16 number
256 times too small, subnormals included. So no GPU needs fp8 of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rapid_llm.kernels.ops.arguments import walk_rows
from rapid_llm.kernels.ops.block_formats import GROUP
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles
from rapid_llm.kernels.ops.triton_support import launch, tl, triton

GEMV_ROWS = 4
"""Up to so many rows of input, each row reads and decodes the weight by itself, and keeps it in fp32."""


@triton.jit
def _decoded(code):
    """fp8 e4m3 bytes as fp32; 0x7f and 0xff are NaN, there is no infinity."""
    sign = (code & 128).to(tl.uint16) << 8
    bits = sign | ((code & 127).to(tl.uint16) << 7)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((code & 127) == 127, float("nan"), value)


@triton.jit
def _scale_at(ptr, step, mask, ALIGNED: tl.constexpr):
    """A little-endian fp32; unless ALIGNED, at any byte address."""
    if ALIGNED:
        value = tl.load(ptr.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    else:
        bits = tl.load(ptr, mask=mask, other=0).to(tl.uint32)
        for byte in tl.static_range(1, 4):
            bits |= tl.load(ptr + byte * step, mask=mask, other=0).to(tl.uint32) << (8 * byte)
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit(do_not_specialize=["rows", "inner"])
def _gemv_fp8_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, rows, inner, outputs, x_outer, x_inner, x_col, y_outer, y_inner, y_col, w_row,
    w_col, b_step, HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """One row of input times BN rows of the weight; programs that share weights are neighbours."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid % rows
    n = pid // rows * BN + tl.arange(0, BN)
    inside = n < outputs
    x_ptr += row // inner * x_outer + row % inner * x_inner
    w_rows = w_ptr + n * w_row
    scales = w_rows + GROUPS * GROUP * w_col
    column = tl.arange(0, GROUP).to(tl.int64)
    acc = tl.zeros((BN, GROUP), tl.float32)
    for group in range(GROUPS):
        k = group * GROUP + column
        x = tl.load(x_ptr + k * x_col).to(tl.float32)
        codes = tl.load(w_rows[:, None] + (k * w_col)[None, :], mask=inside[:, None], other=0)
        d = _scale_at(scales + group * 4 * w_col, w_col, inside, ALIGNED)
        acc += _decoded(codes) * d[:, None] * x[None, :]
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(b_ptr + n * b_step, mask=inside, other=0.0).to(tl.float32)
    y_ptr += row // inner * y_outer + row % inner * y_inner
    tl.store(y_ptr + n * y_col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "inner"])
def _tile_fp8_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, rows, inner, outputs, x_outer, x_inner, x_col, y_outer, y_inner, y_col, w_row,
    w_col, b_step, HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BM rows of input times BN rows of the weight, BK columns of a group at a time."""
    pid = tl.program_id(0).to(tl.int64)
    bands = tl.cdiv(rows, BM)
    m = pid % bands * BM + tl.arange(0, BM)
    n = pid // bands * BN + tl.arange(0, BN)
    inside = n < outputs
    x_rows = x_ptr + (m // inner * x_outer + m % inner * x_inner)[:, None]
    w_rows = w_ptr + n * w_row
    scales = w_rows + GROUPS * GROUP * w_col
    dtype = x_ptr.dtype.element_ty
    acc = tl.zeros((BM, BN), tl.float32)
    for group in range(GROUPS):
        d = _scale_at(scales + group * 4 * w_col, w_col, inside, ALIGNED)
        for part in tl.static_range(GROUP // BK):
            k = (group * GROUP + part * BK + tl.arange(0, BK)).to(tl.int64)
            x = tl.load(x_rows + (k * x_col)[None, :], mask=(m < rows)[:, None], other=0.0)
            codes = tl.load(w_rows[None, :] + (k * w_col)[:, None], mask=inside[None, :], other=0)
            acc = tl.dot(x, (_decoded(codes) * d[None, :]).to(dtype), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(b_ptr + n * b_step, mask=inside, other=0.0).to(tl.float32)[None, :]
    y_rows = y_ptr + (m // inner * y_outer + m % inner * y_inner)[:, None]
    tl.store(y_rows + (n * y_col)[None, :], acc.to(y_ptr.dtype.element_ty), mask=(m < rows)[:, None] & inside[None, :])


@tiles("linear_fp8")
def _tiles(sm: int, *, rows: int, itemsize: int) -> Mapping[str, int]:
    if rows <= GEMV_ROWS:
        return {"BN": 4, "num_warps": 4}
    if itemsize == 4:  # no tensor cores in IEEE fp32: registers bound the tile
        return {"BM": 16, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2}
    if rows <= 64:
        return {"BM": 16 if rows <= 16 else 64, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": 3}
    return {"BM": 128, "BN": 64, "BK": 64, "num_warps": 8, "num_stages": 3}


def launch_fp8(input: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Launch over every row of `input`; arguments are checked."""
    outputs, features = weight.shape[0], input.shape[-1]
    w_row, w_col = weight.stride()
    aligned = w_col == 1 and (weight.data_ptr() | w_row) % 4 == 0
    for rows, inner, strides, (x, y) in walk_rows(input, out):
        meta = resolve_tiles(
            "linear_fp8", input.device, rows=next_power_of_2(rows), itemsize=input.element_size()
        )  # fmt: skip
        kernel = _tile_fp8_kernel if "BM" in meta else _gemv_fp8_kernel
        grid = -(-outputs // meta["BN"]) * -(-rows // meta.get("BM", 1))
        launch(
            kernel, (grid,), input.device, x, y, weight, bias, rows, inner, outputs, *strides, w_row, w_col,
            bias.stride(0) if bias is not None else 0, HAS_BIAS=bias is not None, ALIGNED=aligned,
            GROUPS=features // GROUP, GROUP=GROUP, **meta,
        )  # fmt: skip
