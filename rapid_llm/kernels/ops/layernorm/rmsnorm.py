"""Native `rmsnorm`: one row a program, held in registers up to 16,384 elements; any strides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

import torch

from rapid_llm.kernels.ops.arguments import check_alias, check_tensor, check_written, walk_rows
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles, warps_for
from rapid_llm.kernels.ops.triton_support import attempt, launch, tl, triton, use_triton
from rapid_llm.kernels.registry import ArgumentError

_ZERO = torch.zeros((), dtype=torch.float32, device="cpu")


def rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    """input / sqrt(mean(input**2, -1) + eps) * weight, in fp32. See `rapid_llm.kernels.rmsnorm`."""
    if weight.shape != input.shape[-1:] or weight.device != input.device:
        refuse_weight("rmsnorm", input, weight)
    if out is not None:
        check_tensor("rmsnorm", "out", out, input, input.shape)
        check_alias("rmsnorm", out, "input", input)
        check_written("rmsnorm", "out", out)
    if use_triton("rmsnorm", input):
        result = torch.empty(input.shape, dtype=input.dtype, device=input.device) if out is None else out
        if attempt("rmsnorm", _launch, input, weight, eps, result):
            return result
    if input.dtype is torch.float32 and (out is not None or input.is_contiguous()):
        return normalise(input, weight, eps, out)
    if out is None:
        out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    return out.copy_(normalise(input.float(), weight, eps))


def refuse_weight(op: str, input: torch.Tensor, weight: torch.Tensor) -> NoReturn:
    """A weight that does not have one element a column would broadcast, and be silently wrong."""
    row = tuple(input.shape[-1:])
    if weight.shape != row:
        got = tuple(weight.shape)
        raise ArgumentError(f"{op}: weight must have the same shape as a row of input, {row}: got {got}")
    raise ArgumentError(f"{op}: weight is on {weight.device}, input on {input.device}; CUDA and CPU do not mix")


def normalise(input: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """The norm of an fp32 tensor, into the fp32 `out` or a new tensor, in the fewest PyTorch calls."""
    hidden = input.shape[-1]
    if weight.dtype is not torch.float32:
        weight = weight.float()
    if input.numel() == hidden and not input.is_cuda and input.is_contiguous():
        # One token on the CPU is all call overhead: a host scalar saves three calls (and on CUDA would be a sync).
        row = input.view(-1)
        mean = torch.dot(row, row).item() / hidden + eps if hidden else eps
        inverse = 1.0 / math.sqrt(mean) if mean > 0.0 else (math.inf if mean == 0.0 else math.nan)
        return torch.addcmul(_ZERO, input, weight, value=inverse, out=out)
    norm = torch.linalg.vector_norm(input, 2, -1, True)
    # eps + norm**2 / hidden. A scalar operand would cost more here than this whole call.
    mean = torch.addcmul(torch.scalar_tensor(eps, device=input.device), norm, norm, value=1.0 / max(hidden, 1))
    return torch.mul(input, weight, out=out).mul_(mean.rsqrt_())


@tiles("rmsnorm")
def norm_tiles(sm: int, *, hidden: int, itemsize: int) -> Mapping[str, int]:
    """BLOCK columns at a time, BLOCKS times; one block, held in registers, as long as a program can hold the row."""
    block = next_power_of_2(hidden)
    if block > 16384:
        block = 8192
    return {
        "BLOCK": block,
        "BLOCKS": max(1, -(-hidden // block)),
        "num_warps": warps_for(block, per_thread=max(16 // itemsize, block // 512)),
    }


@triton.jit
def _rmsnorm_kernel(
    x_ptr, out_ptr, weight_ptr, eps, hidden, inner, x_outer, x_inner, x_col, out_outer, out_inner, out_col, weight_col,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row // inner * x_outer + row % inner * x_inner
    out_ptr += row // inner * out_outer + row % inner * out_inner
    col = tl.arange(0, BLOCK).to(tl.int64)
    if BLOCKS == 1:
        x = tl.load(x_ptr + col * x_col, mask=col < hidden, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x) / hidden + eps)
        weight = tl.load(weight_ptr + col * weight_col, mask=col < hidden).to(tl.float32)
        tl.store(out_ptr + col * out_col, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=col < hidden)
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for block in range(BLOCKS):
            at = block * BLOCK + col
            x = tl.load(x_ptr + at * x_col, mask=at < hidden, other=0.0).to(tl.float32)
            squares += x * x
        inverse = 1.0 / tl.sqrt_rn(tl.sum(squares) / hidden + eps)
        for block in range(BLOCKS):
            at = block * BLOCK + col
            x = tl.load(x_ptr + at * x_col, mask=at < hidden).to(tl.float32)
            weight = tl.load(weight_ptr + at * weight_col, mask=at < hidden).to(tl.float32)
            tl.store(out_ptr + at * out_col, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=at < hidden)


def _launch(input: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    hidden = input.shape[-1]
    meta = resolve_tiles("rmsnorm", input.device, hidden=hidden, itemsize=input.element_size())
    for rows, inner, strides, (x, y) in walk_rows(input, out):
        args = (x, y, weight, float(eps), hidden, inner, *strides, weight.stride()[0])
        launch(_rmsnorm_kernel, (rows,), input.device, *args, **meta)
