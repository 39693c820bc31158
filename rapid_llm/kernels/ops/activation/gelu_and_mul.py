"""Native `gelu_and_mul`: GeGLU's elementwise half with the tanh form of GELU, one pass on CUDA, any strides.

0.5 z (1 + tanh u) is z / (1 + exp(-2 u)), and is computed so: the first loses every digit of a strongly negative gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from rapid_llm.kernels.ops.arguments import check_disjoint, check_tensor, check_written, walk_rows
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles, warps_for
from rapid_llm.kernels.ops.triton_support import attempt, launch, tl, triton, use_triton
from rapid_llm.kernels.registry import ArgumentError

_OP: Final = "gelu_and_mul"
_LINEAR: Final = 1.5957691216057308
"""2 sqrt(2 / pi): 2 u = z (_LINEAR + _CUBIC z**2)."""
_CUBIC: Final = 0.07135481627260025
"""0.044715 of it."""


def gelu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(input[..., :d]) * input[..., d:], computed in fp32. See `rapid_llm.kernels.gelu_and_mul`."""
    shape = input.shape
    half, odd = divmod(shape[-1], 2)
    if odd:
        raise ArgumentError(f"{_OP}: the last dimension holds gate and up and must be even, got {shape[-1]}")
    if out is not None:
        check_tensor(_OP, "out", out, input, (*shape[:-1], half))
        check_disjoint(_OP, "out", out, "input", input)
        check_written(_OP, "out", out)
    if use_triton(_OP, input):
        result = torch.empty((*shape[:-1], half), dtype=input.dtype, device=input.device) if out is None else out
        if attempt(_OP, _launch, input, result):
            return result
    gate, up = input.chunk(2, -1)
    gate = gate.float()
    found = (gate * gate).mul_(_CUBIC).add_(_LINEAR).mul_(gate).sigmoid_().mul_(gate)
    if out is None:
        if input.dtype is torch.float32 and found.is_contiguous():
            return found.mul_(up)
        out = torch.empty((*shape[:-1], half), dtype=input.dtype, device=input.device)
    return torch.mul(found, up, out=out)


@tiles(_OP)
def _tiles(sm: int, *, half: int, itemsize: int) -> Mapping[str, int]:
    # One 16-byte load of each half a thread; small blocks, so that one token still spreads over the whole GPU.
    block = min(next_power_of_2(half), 128 * 16 // itemsize)
    return {"BLOCK": block, "num_warps": warps_for(block, per_thread=16 // itemsize)}


@triton.jit
def _gelu_and_mul_kernel(
    x_ptr, out_ptr, half, inner, x_outer, x_inner, x_col, out_outer, out_inner, out_col, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row // inner * x_outer + row % inner * x_inner
    out_ptr += row // inner * out_outer + row % inner * out_inner
    col = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = col < half
    gate = tl.load(x_ptr + col * x_col, mask=mask).to(tl.float32)
    up = tl.load(x_ptr + (col + half) * x_col, mask=mask).to(tl.float32)
    twice = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
    y = gate / (1.0 + tl.exp(-twice)) * up
    tl.store(out_ptr + col * out_col, y.to(out_ptr.dtype.element_ty), mask=mask)


def _launch(input: torch.Tensor, out: torch.Tensor) -> None:
    half = out.shape[-1]
    meta = resolve_tiles(_OP, input.device, half=half, itemsize=input.element_size())
    blocks = -(-half // meta["BLOCK"])
    for rows, inner, strides, pointers in walk_rows(input, out):
        launch(_gelu_and_mul_kernel, (rows, blocks), input.device, *pointers, half, inner, *strides, **meta)
