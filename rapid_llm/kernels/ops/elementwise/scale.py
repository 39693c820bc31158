"""Native `scale`: one pass over memory, any strides."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import torch

from rapid_llm.kernels.ops.arguments import check_disjoint, check_tensor, check_written, merge_dims
from rapid_llm.kernels.ops.tile_policy import resolve_tiles, tiles
from rapid_llm.kernels.ops.triton_support import attempt, launch, tl, triton, use_triton
from rapid_llm.kernels.registry import ArgumentError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_KERNEL_DIMS = 4
_MAX_PROGRAMS = 2**31 - 1


def scale(input: torch.Tensor, factor: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """input * factor, the product taken in fp32 and rounded once. See `rapid_llm.kernels.scale`."""
    if input.dtype not in _DTYPES:
        raise ArgumentError(f"scale: input has dtype {input.dtype}; use float32, float16 or bfloat16")
    if out is None:
        out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    elif out is not input:
        check_tensor("scale", "out", out, input, input.shape)
        if not (out.data_ptr() == input.data_ptr() and out.stride() == input.stride()):
            check_disjoint("scale", "out", out, "input", input)
        check_written("scale", "out", out)
    else:
        check_written("scale", "out", out)
    if use_triton("scale", input) and attempt("scale", _launch, input, float(factor), out):
        return out
    return torch.mul(input, factor, out=out)


@tiles("scale")
def _tiles(sm: int, *, itemsize: int) -> Mapping[str, int]:
    # 16 bytes a thread and load, two loads in flight: a memory-bound kernel wants bytes under way, not big tiles.
    return {"BLOCK": 128 * 2 * 16 // itemsize, "num_warps": 4}


@triton.jit
def _scale_dense(x_ptr, out_ptr, factor, x_offset, out_offset, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    x = tl.load(x_ptr + x_offset + at, mask=mask).to(tl.float32)
    tl.store(out_ptr + out_offset + at, (x * factor).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scale_strided(
    x_ptr, out_ptr, factor, x_offset, out_offset, numel,
    size1, size2, size3, xs0, xs1, xs2, xs3, os0, os1, os2, os3,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rest = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = rest < numel
    i3 = rest % size3
    rest = rest // size3
    i2 = rest % size2
    rest = rest // size2
    i1 = rest % size1
    i0 = rest // size1
    x = tl.load(x_ptr + x_offset + i0 * xs0 + i1 * xs1 + i2 * xs2 + i3 * xs3, mask=mask).to(tl.float32)
    y = (x * factor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offset + i0 * os0 + i1 * os1 + i2 * os2 + i3 * os3, y, mask=mask)


def _launch(input: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    dims = merge_dims(input.shape, input.stride(), out.stride())
    outer, inner = dims[:-_KERNEL_DIMS], dims[-_KERNEL_DIMS:]
    for index in product(*(range(size) for size, _, _ in outer)):  # one turn unless five dimensions cannot be merged
        x_offset = sum(i * d[1] for i, d in zip(index, outer, strict=True))
        out_offset = sum(i * d[2] for i, d in zip(index, outer, strict=True))
        _launch_block(input, factor, out, x_offset, out_offset, inner)


def _launch_block(
    input: torch.Tensor, factor: float, out: torch.Tensor, x_offset: int, out_offset: int, dims: list[tuple[int, ...]]
) -> None:
    numel = 1
    for size, _, _ in dims:
        numel *= size
    meta = resolve_tiles("scale", input.device, itemsize=input.element_size())
    grid = (-(-numel // meta["BLOCK"]),)
    common = (input, out, factor, x_offset, out_offset, numel)
    if not dims or (len(dims) == 1 and dims[0][1:] == (1, 1)):
        launch(_scale_dense, grid, input.device, *common, **meta)
        return
    sizes, x_strides, out_strides = zip(*([(1, 0, 0)] * (_KERNEL_DIMS - len(dims)) + dims), strict=True)
    launch(_scale_strided, grid, input.device, *common, *sizes[1:], *x_strides, *out_strides, **meta)
