"""Native `linear`: input @ weight.T + bias for dense and quantised weights.

Here: the door, PyTorch's path for the CPU, and Triton for dense weights. `linear_quantised` has Triton for GGUF's
simplest blocks, `linear_fp8` and `linear_scaled` for rows of codes. Younger blocks are dequantised by PyTorch, a piece
at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rapid_llm.kernels.ops.arguments import check_disjoint, check_kind, check_tensor, check_written, walk_rows
from rapid_llm.kernels.ops.block_formats import BLOCK_BYTES, FORMATS, FP8, row_bytes
from rapid_llm.kernels.ops.gemm import linear_fp8, linear_quantised, linear_scaled
from rapid_llm.kernels.ops.gemm.dequantise import pieces
from rapid_llm.kernels.ops.gemm.gguf_blocks import DECODERS
from rapid_llm.kernels.ops.gemm.precision import exact_linear
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles
from rapid_llm.kernels.ops.triton_support import attempt, launch, tl, triton, use_triton
from rapid_llm.kernels.registry import ArgumentError

DENSE = "unquantized"
GEMV_ROWS = 4
"""Up to so many rows of input, each row reads the weight by itself: they meet in the L2 cache."""

MANY_TILES = 96
"""So many tiles of 128 by 128 keep a GPU busy; with fewer, smaller tiles that spread further are faster."""


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = DENSE
) -> Tensor:
    """input @ weight.T + bias. See `rapid_llm.kernels.linear`."""
    outputs = _check(input, weight, bias, scheme)
    if out is not None:
        check_tensor("linear", "out", out, input, (*input.shape[:-1], outputs))
        check_written("linear", "out", out)
        for name, tensor in (("input", input), ("weight", weight), ("bias", bias)):
            if tensor is not None:
                check_disjoint("linear", "out", out, name, tensor)
    if use_triton("linear", input):
        shape = (*input.shape[:-1], outputs)
        result = torch.empty(shape, dtype=input.dtype, device=input.device) if out is None else out
        if attempt("linear", _launch, input, weight, bias, result, scheme):
            return result
    result = _by_torch(input, weight, bias, scheme)
    return result if out is None else out.copy_(result)


def _check(input: Tensor, weight: Tensor, bias: Tensor | None, scheme: str) -> int:
    """The number of outputs; raises `ArgumentError` where the tensors do not fit each other."""
    if weight.dim() != 2 or input.dim() == 0:
        raise ArgumentError(
            f"linear: input needs a last dimension and weight two dimensions, got {tuple(input.shape)} and "
            f"{tuple(weight.shape)}"
        )
    outputs, columns = weight.shape
    features = input.shape[-1]
    if scheme == DENSE:
        check_kind("linear", "weight", weight, input)
        wanted = features
    else:
        wanted = _quantised_width(input, weight, scheme)
    if columns != wanted:
        raise ArgumentError(
            f"linear: weight and input do not meet in the same shape: input {tuple(input.shape)} takes weight rows of "
            f"{wanted} ({scheme}), got {tuple(weight.shape)}"
        )
    if bias is not None:
        check_tensor("linear", "bias", bias, input, (outputs,))
    return outputs


def _quantised_width(input: Tensor, weight: Tensor, scheme: str) -> int:
    """The bytes of a row of a weight of `scheme` that input fits."""
    if scheme not in FORMATS:
        raise ArgumentError(f"linear: unknown scheme {scheme!r}; known: {', '.join((DENSE, *FORMATS))}")
    if weight.dtype is not torch.uint8 or weight.device != input.device:
        raise ArgumentError(
            f"linear: a {scheme} weight is uint8 blocks on input's device, {input.device}: got {weight.dtype} on "
            f"{weight.device}; CUDA and CPU do not mix"
        )
    try:
        return row_bytes(input.shape[-1], scheme)
    except ValueError as error:
        raise ArgumentError(f"linear: {error}") from None


def _by_torch(input: Tensor, weight: Tensor, bias: Tensor | None, scheme: str) -> Tensor:
    """PyTorch's GEMM; of a quantised weight a bounded piece is dequantised at a time, and multiplied in fp32."""
    if scheme == DENSE:
        if input.dim() == 2:
            return exact_linear(input, weight, bias)
        # In two dimensions, as torch otherwise adds some biases after it has rounded the product.
        flat = exact_linear(input.reshape(-1, input.shape[-1]), weight, bias)
        return flat.view(*input.shape[:-1], weight.shape[0])
    wide = input.float()
    wide_bias = None if bias is None else bias.float()
    parts = [input.new_empty(*input.shape[:-1], 0)]
    for first, dense in pieces(weight, scheme):
        part = None if wide_bias is None else wide_bias[first : first + dense.shape[0]]
        parts.append(exact_linear(wide, dense, part).to(input.dtype))
    return parts[1] if len(parts) == 2 else torch.cat(parts, -1)


@tiles("linear")
def _tiles(sm: int, *, rows: int, outputs: int, features: int, itemsize: int) -> Mapping[str, int]:
    if rows <= GEMV_ROWS:
        # A weight is read once: few outputs a program, so that small layers still spread over the whole GPU.
        block_k = min(next_power_of_2(features), 2048 // itemsize)
        return {"BN": 2 if outputs < 8192 else 8, "BK": block_k, "num_warps": 4 if block_k >= 1024 else 1}
    if itemsize == 4:  # no tensor cores in IEEE fp32: registers bound the tile
        return {"BM": 16 if rows <= 16 else 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
    if rows <= 16:
        return {"BM": 16, "BN": 16, "BK": 128, "num_warps": 2, "num_stages": 5}
    if rows <= 32 or -(-rows // 128) * -(-outputs // 128) < MANY_TILES:
        return {"BM": 32 if rows <= 32 else 64, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": 4}
    return {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 4}


@triton.jit(do_not_specialize=["rows", "inner"])
def _gemv_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, rows, inner, outputs, features, x_outer, x_inner, x_col, y_outer, y_inner, y_col,
    w_row, w_col, b_step, HAS_BIAS: tl.constexpr, STEPS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One row of input times BN rows of the weight; programs that share weights are neighbours."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid % rows
    n = pid // rows * BN + tl.arange(0, BN)
    x_ptr += row // inner * x_outer + row % inner * x_inner
    acc = tl.zeros((BN, BK), tl.float32)
    for step in range(STEPS):
        k = (step * BK + tl.arange(0, BK)).to(tl.int64)
        x = tl.load(x_ptr + k * x_col, mask=k < features, other=0.0).to(tl.float32)
        inside = (n < outputs)[:, None] & (k < features)[None, :]
        w = tl.load(w_ptr + n[:, None] * w_row + k[None, :] * w_col, mask=inside, other=0.0).to(tl.float32)
        acc += w * x[None, :]
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(b_ptr + n * b_step, mask=n < outputs, other=0.0).to(tl.float32)
    y_ptr += row // inner * y_outer + row % inner * y_inner
    tl.store(y_ptr + n * y_col, y.to(y_ptr.dtype.element_ty), mask=n < outputs)


@triton.jit(do_not_specialize=["rows", "inner"])
def _tile_kernel(
    x_ptr, y_ptr, w_ptr, b_ptr, rows, inner, outputs, features, x_outer, x_inner, x_col, y_outer, y_inner, y_col,
    w_row, w_col, b_step, HAS_BIAS: tl.constexpr, STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """BM rows of input times BN rows of the weight; programs that share weights are neighbours."""
    pid = tl.program_id(0).to(tl.int64)
    bands = tl.cdiv(rows, BM)
    m = pid % bands * BM + tl.arange(0, BM)
    n = pid // bands * BN + tl.arange(0, BN)
    x_rows = x_ptr + (m // inner * x_outer + m % inner * x_inner)[:, None]
    w_rows = w_ptr + (n * w_row)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(STEPS):
        k = (step * BK + tl.arange(0, BK)).to(tl.int64)
        x = tl.load(x_rows + k[None, :] * x_col, mask=(m < rows)[:, None] & (k < features)[None, :], other=0.0)
        w = tl.load(w_rows + k[:, None] * w_col, mask=(k < features)[:, None] & (n < outputs)[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(b_ptr + n * b_step, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    y_rows = y_ptr + (m // inner * y_outer + m % inner * y_inner)[:, None]
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(y_rows + n[None, :] * y_col, acc.to(y_ptr.dtype.element_ty), mask=inside)


def _launch(input: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, scheme: str) -> None:
    if scheme == DENSE:
        _launch_dense(input, weight, bias, out)
    elif scheme == FP8:
        linear_fp8.launch_fp8(input, weight, bias, out)
    elif scheme in BLOCK_BYTES:
        linear_quantised.launch_blocks(input, weight, bias, out, scheme, _launch_dense)
    elif scheme in DECODERS:
        _dequantise_and_launch(input, weight, bias, out, scheme)
    else:
        linear_scaled.launch_scaled(input, weight, bias, out, scheme)


def _dequantise_and_launch(input: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, scheme: str) -> None:
    """A bounded piece of the weight at a time, rounded to input's dtype for tensor cores."""
    for first, dense in pieces(weight, scheme):
        last = first + dense.shape[0]
        part = None if bias is None else bias[first:last]
        _launch_dense(input, dense.to(input.dtype), part, out[..., first:last])


def _launch_dense(input: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    outputs, features = weight.shape
    for rows, inner, strides, (x, y) in walk_rows(input, out):
        meta = resolve_tiles(
            "linear", input.device, rows=next_power_of_2(rows), outputs=outputs, features=features,
            itemsize=input.element_size(),
        )  # fmt: skip
        kernel = _tile_kernel if "BM" in meta else _gemv_kernel
        grid = -(-outputs // meta["BN"]) * -(-rows // meta.get("BM", 1))
        launch(
            kernel, (grid,), input.device, x, y, weight, bias, rows, inner, outputs, features, *strides,
            *weight.stride(), bias.stride(0) if bias is not None else 0, HAS_BIAS=bias is not None,
            STEPS=-(-features // meta["BK"]), **meta,
        )  # fmt: skip
