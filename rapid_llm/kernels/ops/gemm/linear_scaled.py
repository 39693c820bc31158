"""Triton kernels of `linear` over rows of `scaled_rows`: e4m3, int8 or int4 codes that are decoded in registers.

A row's one scale multiplies its sum, so that codes enter tensor cores exactly, whatever their 16-bit dtype. int4 has a
scale and a zero point for each group, and two weights a byte: columns 2i and 2i + 1 are multiplied apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rapid_llm.kernels.ops.arguments import walk_rows
from rapid_llm.kernels.ops.block_formats import INT4_GROUPS, INT8_CHANNEL
from rapid_llm.kernels.ops.gemm.linear_fp8 import _decoded, _scale_at
from rapid_llm.kernels.ops.gemm.linear_quantised import _half_at
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles
from rapid_llm.kernels.ops.triton_support import launch, tl, triton

GEMV_ROWS = 4
"""Up to so many rows of input, each row reads and decodes the weight by itself, and keeps it in fp32."""


@triton.jit
def _number(code, INT8: tl.constexpr):
    """What a byte stands for, in fp32."""
    return code.to(tl.int8, bitcast=True).to(tl.float32) if INT8 else _decoded(code)


@triton.jit(do_not_specialize=["rows", "inner"])
def _gemv_channel_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, rows, inner, outputs, features, x_outer, x_inner, x_col, y_outer, y_inner, y_col, w_row,
    w_col, b_step, HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr, INT8: tl.constexpr, STEPS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One row of input times BN rows of the weight; programs that share weights are neighbours."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid % rows
    n = pid // rows * BN + tl.arange(0, BN)
    inside = n < outputs
    x_ptr += row // inner * x_outer + row % inner * x_inner
    w_rows = w_ptr + n * w_row
    acc = tl.zeros((BN, BK), tl.float32)
    for step in range(STEPS):
        k = (step * BK + tl.arange(0, BK)).to(tl.int64)
        x = tl.load(x_ptr + k * x_col, mask=k < features, other=0.0).to(tl.float32)
        mask = inside[:, None] & (k < features)[None, :]
        codes = tl.load(w_rows[:, None] + (k * w_col)[None, :], mask=mask, other=0)
        acc += _number(codes, INT8) * x[None, :]
    y = tl.sum(acc, 1) * _scale_at(w_rows + features * w_col, w_col, inside, ALIGNED)
    if HAS_BIAS:
        y += tl.load(b_ptr + n * b_step, mask=inside, other=0.0).to(tl.float32)
    y_ptr += row // inner * y_outer + row % inner * y_inner
    tl.store(y_ptr + n * y_col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "inner"])
def _tile_channel_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, rows, inner, outputs, features, x_outer, x_inner, x_col, y_outer, y_inner, y_col, w_row,
    w_col, b_step, HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr, INT8: tl.constexpr, STEPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BM rows of input times BN rows of the weight; programs that share weights are neighbours."""
    pid = tl.program_id(0).to(tl.int64)
    bands = tl.cdiv(rows, BM)
    m = pid % bands * BM + tl.arange(0, BM)
    n = pid // bands * BN + tl.arange(0, BN)
    inside = n < outputs
    x_rows = x_ptr + (m // inner * x_outer + m % inner * x_inner)[:, None]
    w_rows = w_ptr + n * w_row
    dtype = x_ptr.dtype.element_ty
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(STEPS):
        k = (step * BK + tl.arange(0, BK)).to(tl.int64)
        here = k < features
        x = tl.load(x_rows + (k * x_col)[None, :], mask=(m < rows)[:, None] & here[None, :], other=0.0)
        codes = tl.load(w_rows[None, :] + (k * w_col)[:, None], mask=here[:, None] & inside[None, :], other=0)
        acc = tl.dot(x, _number(codes, INT8).to(dtype), acc, input_precision="ieee")
    acc *= _scale_at(w_rows + features * w_col, w_col, inside, ALIGNED)[None, :]
    if HAS_BIAS:
        acc += tl.load(b_ptr + n * b_step, mask=inside, other=0.0).to(tl.float32)[None, :]
    y_rows = y_ptr + (m // inner * y_outer + m % inner * y_inner)[:, None]
    tl.store(y_rows + (n * y_col)[None, :], acc.to(y_ptr.dtype.element_ty), mask=(m < rows)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows", "inner"])
def _gemv_int4_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, rows, inner, outputs, features, x_outer, x_inner, x_col, y_outer, y_inner, y_col, w_row,
    w_col, b_step, HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """One row of input times BN rows of the weight; programs that share weights are neighbours."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid % rows
    n = pid // rows * BN + tl.arange(0, BN)
    inside = n < outputs
    x_ptr += row // inner * x_outer + row % inner * x_inner
    w_rows = w_ptr + n * w_row
    pairs = w_rows + GROUPS * HALF * w_col
    byte = tl.arange(0, HALF).to(tl.int64)
    acc = tl.zeros((BN, HALF), tl.float32)
    for group in range(GROUPS):
        at = group * HALF + byte
        codes = tl.load(w_rows[:, None] + (at * w_col)[None, :], mask=inside[:, None], other=0)
        d = _half_at(pairs + group * 4 * w_col, w_col, inside, ALIGNED)[:, None]
        z = _half_at(pairs + (group * 4 + 2) * w_col, w_col, inside, ALIGNED)[:, None]
        even = tl.load(x_ptr + 2 * at * x_col).to(tl.float32)
        odd = tl.load(x_ptr + (2 * at + 1) * x_col).to(tl.float32)
        acc += ((codes & 15).to(tl.float32) - z) * d * even[None, :]
        acc += ((codes >> 4).to(tl.float32) - z) * d * odd[None, :]
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(b_ptr + n * b_step, mask=inside, other=0.0).to(tl.float32)
    y_ptr += row // inner * y_outer + row % inner * y_inner
    tl.store(y_ptr + n * y_col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "inner"])
def _tile_int4_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, rows, inner, outputs, features, x_outer, x_inner, x_col, y_outer, y_inner, y_col, w_row,
    w_col, b_step, HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM rows of input times BN rows of the weight, a group at a time."""
    pid = tl.program_id(0).to(tl.int64)
    bands = tl.cdiv(rows, BM)
    m = pid % bands * BM + tl.arange(0, BM)
    n = pid // bands * BN + tl.arange(0, BN)
    inside = n < outputs
    x_rows = x_ptr + (m // inner * x_outer + m % inner * x_inner)[:, None]
    w_rows = w_ptr + n * w_row
    pairs = w_rows + GROUPS * HALF * w_col
    dtype = x_ptr.dtype.element_ty
    byte = tl.arange(0, HALF).to(tl.int64)
    taken = (m < rows)[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for group in range(GROUPS):
        at = group * HALF + byte
        codes = tl.load(w_rows[None, :] + (at * w_col)[:, None], mask=inside[None, :], other=0)
        d = _half_at(pairs + group * 4 * w_col, w_col, inside, ALIGNED)[None, :]
        z = _half_at(pairs + (group * 4 + 2) * w_col, w_col, inside, ALIGNED)[None, :]
        even = tl.load(x_rows + (2 * at * x_col)[None, :], mask=taken, other=0.0)
        acc = tl.dot(even, (((codes & 15).to(tl.float32) - z) * d).to(dtype), acc, input_precision="ieee")
        odd = tl.load(x_rows + ((2 * at + 1) * x_col)[None, :], mask=taken, other=0.0)
        acc = tl.dot(odd, (((codes >> 4).to(tl.float32) - z) * d).to(dtype), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(b_ptr + n * b_step, mask=inside, other=0.0).to(tl.float32)[None, :]
    y_rows = y_ptr + (m // inner * y_outer + m % inner * y_inner)[:, None]
    tl.store(y_rows + (n * y_col)[None, :], acc.to(y_ptr.dtype.element_ty), mask=taken & inside[None, :])


@tiles("linear_channel")
def _channel_tiles(sm: int, *, rows: int, itemsize: int) -> Mapping[str, int]:
    if rows <= GEMV_ROWS:
        return {"BN": 4, "BK": 256, "num_warps": 4}
    if itemsize == 4:  # no tensor cores in IEEE fp32: registers bound the tile
        return {"BM": 16, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2}
    if rows <= 64:
        return {"BM": 16 if rows <= 16 else 64, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": 3}
    return {"BM": 128, "BN": 64, "BK": 64, "num_warps": 8, "num_stages": 3}


@tiles("linear_int4")
def _int4_tiles(sm: int, *, rows: int, half: int, itemsize: int) -> Mapping[str, int]:
    if rows <= GEMV_ROWS:
        return {"BN": 256 // half, "num_warps": 2}
    if itemsize == 4:
        return {"BM": 16, "BN": 64, "num_warps": 4, "num_stages": 2}
    if rows <= 64:
        return {"BM": 16 if rows <= 16 else 64, "BN": 32, "num_warps": 4, "num_stages": 3}
    return {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3}


def launch_scaled(input: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, scheme: str) -> None:
    """Launch over every row of `input`; arguments are checked."""
    outputs, features, itemsize = weight.shape[0], input.shape[-1], input.element_size()
    w_row, w_col = weight.stride()
    group = INT4_GROUPS.get(scheme)
    width = 4 if group is None else 2
    meta: dict[str, object] = {"ALIGNED": w_col == 1 and (weight.data_ptr() | w_row) % width == 0}
    for rows, inner, strides, (x, y) in walk_rows(input, out):
        count = next_power_of_2(rows)
        if group is None:
            chosen = resolve_tiles("linear_channel", input.device, rows=count, itemsize=itemsize)
            kernel = _tile_channel_kernel if "BM" in chosen else _gemv_channel_kernel
            meta |= {"INT8": scheme == INT8_CHANNEL, "STEPS": -(-features // chosen["BK"])}
        else:
            chosen = resolve_tiles("linear_int4", input.device, rows=count, half=group // 2, itemsize=itemsize)
            kernel = _tile_int4_kernel if "BM" in chosen else _gemv_int4_kernel
            meta |= {"GROUPS": features // group, "HALF": group // 2}
        grid = -(-outputs // chosen["BN"]) * -(-rows // chosen.get("BM", 1))
        launch(
            kernel, (grid,), input.device, x, y, weight, bias, rows, inner, outputs, features, *strides, w_row, w_col,
            bias.stride(0) if bias is not None else 0, HAS_BIAS=bias is not None, **meta, **chosen,
        )  # fmt: skip
