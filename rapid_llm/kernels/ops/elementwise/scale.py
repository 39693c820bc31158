"""Native `scale`: one pass over memory, any strides."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from rapid_llm.kernels.ops.arguments import check_alias, check_tensor, check_written, walk
from rapid_llm.kernels.ops.tile_policy import resolve_tiles, tiles
from rapid_llm.kernels.ops.triton_support import attempt, launch, tl, triton, use_triton
from rapid_llm.kernels.registry import ArgumentError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def scale(input: torch.Tensor, factor: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """input * factor, the product taken in fp32 and rounded once. See `rapid_llm.kernels.scale`."""
    if input.dtype not in _DTYPES:
        raise ArgumentError(f"scale: input has dtype {input.dtype}; use float32, float16 or bfloat16")
    if out is None:
        out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    else:
        check_tensor("scale", "out", out, input, input.shape)
        check_alias("scale", out, "input", input)
        check_written("scale", "out", out)
    if use_triton("scale", input) and attempt("scale", _launch, input, float(factor), out):
        return out
    return torch.mul(input, factor, out=out)


@tiles("scale")
def _tiles(sm: int, *, itemsize: int) -> Mapping[str, int]:
    # 16 bytes a thread and load, two loads in flight: a memory-bound kernel wants bytes under way, not big tiles.
    return {"BLOCK": 128 * 2 * 16 // itemsize, "num_warps": 4}


@triton.jit
def _scale_dense(x_ptr, out_ptr, factor, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    x = tl.load(x_ptr + at, mask=mask).to(tl.float32)
    tl.store(out_ptr + at, (x * factor).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scale_strided(
    x_ptr, out_ptr, factor, numel, size1, size2, size3, xs0, xs1, xs2, xs3, os0, os1, os2, os3, BLOCK: tl.constexpr
):
    rest = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = rest < numel
    i3 = rest % size3
    rest = rest // size3
    i2 = rest % size2
    rest = rest // size2
    i1 = rest % size1
    i0 = rest // size1
    x = tl.load(x_ptr + i0 * xs0 + i1 * xs1 + i2 * xs2 + i3 * xs3, mask=mask).to(tl.float32)
    y = (x * factor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + i0 * os0 + i1 * os1 + i2 * os2 + i3 * os3, y, mask=mask)


def _launch(input: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    meta = resolve_tiles("scale", input.device, itemsize=input.element_size())
    for dims, (x, y) in walk(input.shape, 4, input, out):
        sizes, x_strides, out_strides = zip(*dims, strict=True)
        numel = prod(sizes)
        grid = (-(-numel // meta["BLOCK"]),)
        if sizes[2] == 1 and x_strides[3] == out_strides[3] == 1:
            launch(_scale_dense, grid, input.device, x, y, factor, numel, **meta)
        else:
            args = (x, y, factor, numel, *sizes[1:], *x_strides, *out_strides)
            launch(_scale_strided, grid, input.device, *args, **meta)
