"""Native `fused_add_rmsnorm`: residual addition and norm in one pass over memory; any strides."""

from __future__ import annotations

import torch

from rapid_llm.kernels.ops.arguments import check_disjoint, check_tensor, check_written, walk_rows
from rapid_llm.kernels.ops.layernorm.rmsnorm import norm_tiles, normalise, refuse_weight
from rapid_llm.kernels.ops.tile_policy import resolve_tiles, tiles
from rapid_llm.kernels.ops.triton_support import attempt, launch, tl, triton, use_triton


def fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    """residual += input; input = rmsnorm(residual), in place. See `rapid_llm.kernels.fused_add_rmsnorm`."""
    check_tensor("fused_add_rmsnorm", "residual", residual, input, input.shape)
    if weight.shape != input.shape[-1:] or weight.device != input.device:
        refuse_weight("fused_add_rmsnorm", input, weight)
    check_written("fused_add_rmsnorm", "input", input)
    check_written("fused_add_rmsnorm", "residual", residual)
    check_disjoint("fused_add_rmsnorm", "input", input, "residual", residual)
    if use_triton("fused_add_rmsnorm", input) and attempt("fused_add_rmsnorm", _launch, input, residual, weight, eps):
        return
    if input.dtype is torch.float32:  # the stored sum is the fp32 sum
        normalise(residual.add_(input), weight, eps, out=input)
        return
    total = input.float().add_(residual)
    residual.copy_(total)
    input.copy_(normalise(total, weight, eps))


tiles("fused_add_rmsnorm")(norm_tiles)


@triton.jit
def _fused_add_rmsnorm_kernel(
    x_ptr, res_ptr, weight_ptr, eps, hidden, inner, x_outer, x_inner, x_col, res_outer, res_inner, res_col, weight_col,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row // inner * x_outer + row % inner * x_inner
    res_ptr += row // inner * res_outer + row % inner * res_inner
    col = tl.arange(0, BLOCK).to(tl.int64)
    if BLOCKS == 1:
        mask = col < hidden
        x = tl.load(x_ptr + col * x_col, mask=mask, other=0.0).to(tl.float32)
        total = x + tl.load(res_ptr + col * res_col, mask=mask, other=0.0).to(tl.float32)
        tl.store(res_ptr + col * res_col, total.to(res_ptr.dtype.element_ty), mask=mask)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(total * total) / hidden + eps)
        weight = tl.load(weight_ptr + col * weight_col, mask=mask).to(tl.float32)
        tl.store(x_ptr + col * x_col, (total * inverse * weight).to(x_ptr.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for block in range(BLOCKS):
            at = block * BLOCK + col
            x = tl.load(x_ptr + at * x_col, mask=at < hidden, other=0.0).to(tl.float32)
            total = x + tl.load(res_ptr + at * res_col, mask=at < hidden, other=0.0).to(tl.float32)
            squares += total * total
        inverse = 1.0 / tl.sqrt_rn(tl.sum(squares) / hidden + eps)
        for block in range(BLOCKS):  # the sum is taken again, because the stored one is rounded
            at = block * BLOCK + col
            x = tl.load(x_ptr + at * x_col, mask=at < hidden).to(tl.float32)
            total = x + tl.load(res_ptr + at * res_col, mask=at < hidden).to(tl.float32)
            tl.store(res_ptr + at * res_col, total.to(res_ptr.dtype.element_ty), mask=at < hidden)
            weight = tl.load(weight_ptr + at * weight_col, mask=at < hidden).to(tl.float32)
            tl.store(x_ptr + at * x_col, (total * inverse * weight).to(x_ptr.dtype.element_ty), mask=at < hidden)


def _launch(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    hidden = input.shape[-1]
    meta = resolve_tiles("fused_add_rmsnorm", input.device, hidden=hidden, itemsize=input.element_size())
    for rows, inner, strides, (x, res) in walk_rows(input, residual):
        args = (x, res, weight, float(eps), hidden, inner, *strides, weight.stride()[0])
        launch(_fused_add_rmsnorm_kernel, (rows,), input.device, *args, **meta)
