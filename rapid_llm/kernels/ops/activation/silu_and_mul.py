"""Native `silu_and_mul`: SwiGLU's elementwise half, one pass, any strides."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812

from rapid_llm.kernels.ops.arguments import check_disjoint, check_tensor, check_written, walk_rows
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles, warps_for
from rapid_llm.kernels.ops.triton_support import attempt, launch, tl, triton, use_triton
from rapid_llm.kernels.registry import ArgumentError


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(input[..., :d]) * input[..., d:], computed in fp32. See `rapid_llm.kernels.silu_and_mul`."""
    shape = input.shape
    half, odd = divmod(shape[-1], 2)
    if odd:
        raise ArgumentError(f"silu_and_mul: the last dimension holds gate and up and must be even, got {shape[-1]}")
    if out is not None:
        check_tensor("silu_and_mul", "out", out, input, (*shape[:-1], half))
        check_disjoint("silu_and_mul", "out", out, "input", input)
        check_written("silu_and_mul", "out", out)
    if use_triton("silu_and_mul", input):
        result = torch.empty((*shape[:-1], half), dtype=input.dtype, device=input.device) if out is None else out
        if attempt("silu_and_mul", _launch, input, result):
            return result
    gate, up = input.chunk(2, -1)
    if out is None and input.dtype is torch.float32 and input.is_contiguous():
        return F.silu(gate).mul_(up)
    if out is None:
        out = torch.empty((*shape[:-1], half), dtype=input.dtype, device=input.device)
    return torch.mul(F.silu(gate.float()), up, out=out)


@tiles("silu_and_mul")
def _tiles(sm: int, *, half: int, itemsize: int) -> Mapping[str, int]:
    # One 16-byte load of each half a thread; small blocks, so that one token still spreads over the whole GPU.
    block = min(next_power_of_2(half), 128 * 16 // itemsize)
    return {"BLOCK": block, "num_warps": warps_for(block, per_thread=16 // itemsize)}


@triton.jit
def _silu_and_mul_kernel(
    x_ptr, out_ptr, half, inner, x_outer, x_inner, x_col, out_outer, out_inner, out_col, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row // inner * x_outer + row % inner * x_inner
    out_ptr += row // inner * out_outer + row % inner * out_inner
    col = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = col < half
    gate = tl.load(x_ptr + col * x_col, mask=mask).to(tl.float32)
    up = tl.load(x_ptr + (col + half) * x_col, mask=mask).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + col * out_col, y.to(out_ptr.dtype.element_ty), mask=mask)


def _launch(input: torch.Tensor, out: torch.Tensor) -> None:
    half = out.shape[-1]
    meta = resolve_tiles("silu_and_mul", input.device, half=half, itemsize=input.element_size())
    blocks = -(-half // meta["BLOCK"])
    for rows, inner, strides, pointers in walk_rows(input, out):
        launch(_silu_and_mul_kernel, (rows, blocks), input.device, *pointers, half, inner, *strides, **meta)
