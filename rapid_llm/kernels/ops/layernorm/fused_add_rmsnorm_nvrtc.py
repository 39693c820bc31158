"""`nvrtc/fused_add_rmsnorm`: the kernels of csrc/layernorm/fused_add_rmsnorm.cuh, compiled by NVRTC, for dense
tensors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.nvrtc import TYPES, VECTOR, Kernels
from rapid_llm.kernels.ops.arguments import check_dense, check_disjoint, check_tensor
from rapid_llm.kernels.ops.layernorm.rmsnorm_nvrtc import ANY_ROW, KINDS, ROW, check_weight, row_block, row_class


def _instances(dtype: str) -> dict[Hashable, tuple[str, str]]:
    """Variants are (whether the weight has the row's dtype, vectors in a thread), and the width of those for any."""
    own, width = TYPES[dtype], VECTOR[dtype]
    found: dict[Hashable, tuple[str, str]] = {
        (same, each): (f"rapid_llm::fused_add_rmsnorm_kernel<{own}, {own if same else 'float'}, {width}, {each}>", ROW)
        for same in ((True,) if dtype == "fp32" else (True, False))
        for each in (1, 2, 4)
        if each * width <= 16
    }
    return found | {w: (f"rapid_llm::fused_add_rmsnorm_any_kernel<{own}, {w}>", ANY_ROW) for w in (1, width)}


_kernels: Final = Kernels("fused_add_rmsnorm", "layernorm/fused_add_rmsnorm.cuh", _instances)
prepare: Final = _kernels.prepare


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """fused_add_rmsnorm of contiguous CUDA tensors, in place. See the op."""
    check_dense("fused_add_rmsnorm", "input", input)
    launches = _kernels[input.get_device(), input.dtype]
    check_dense("fused_add_rmsnorm", "residual", residual)
    check_tensor("fused_add_rmsnorm", "residual", residual, input, input.shape)
    hidden = check_weight("fused_add_rmsnorm", weight, input)
    check_disjoint("fused_add_rmsnorm", "input", input, "residual", residual)
    check_disjoint("fused_add_rmsnorm", "input", input, "weight", weight)
    check_disjoint("fused_add_rmsnorm", "residual", residual, "weight", weight)
    count = input.numel()
    if count == 0:
        return
    rows = count // hidden
    x, total, scale = input.data_ptr(), residual.data_ptr(), weight.data_ptr()
    same = weight.dtype is input.dtype
    width = 16 // input.element_size()
    vectors = hidden % width == 0 and not (x | total | scale) & 15
    tail = (eps, 1.0 / hidden, hidden, rows, 1, hidden, 0, hidden, 0)
    if vectors and (same or weight.dtype is torch.float32):
        each, threads, together = row_block(width, row_class(rows), hidden // width, 16 // width)
        if each:
            launches[same, each](-(-rows // together), threads, together, x, total, scale, *tail)
            return
    width = width if vectors else 1
    _, threads, together = row_block(width, row_class(rows), -(-hidden // width), 4)
    launches[width](-(-rows // together), threads, together, x, total, scale, KINDS[weight.dtype], *tail)
