"""`flashinfer/fused_add_rmsnorm.*`: addition and norm in place; the norm reads the unrounded sum, as the op asks."""

from __future__ import annotations

import torch

from rapid_llm.kernels.backend.flashinfer import LIBRARY
from rapid_llm.kernels.backend.flashinfer._calls import aligned, first_use, on_device
from rapid_llm.kernels.ops.arguments import check_disjoint, check_tensor
from rapid_llm.kernels.ops.layernorm.rmsnorm import refuse_weight
from rapid_llm.kernels.registry import ArgumentError

_fused_add_rmsnorm = LIBRARY.function("fused_add_rmsnorm")


def fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    """residual += input; input = rmsnorm(residual), in place, the weight rounded to input's dtype."""
    check_tensor("fused_add_rmsnorm", "residual", residual, input, input.shape)
    if weight.shape != input.shape[-1:] or weight.device != input.device:
        refuse_weight("fused_add_rmsnorm", input, weight)
    check_disjoint("fused_add_rmsnorm", "input", input, "residual", residual)
    if not (input.is_contiguous() and residual.is_contiguous()):
        raise ArgumentError(
            "fused_add_rmsnorm: flashinfer needs contiguous tensors: "
            f"input has strides {input.stride()}, residual {residual.stride()}"
        )
    if not input.numel():
        return
    weight = aligned(weight.to(input.dtype).contiguous())
    first_use("fused_add_rmsnorm", input.dtype, input.shape[-1])
    values, total = aligned(input), aligned(residual)
    with on_device(input):
        _fused_add_rmsnorm(values.view(-1, input.shape[-1]), total.view(-1, input.shape[-1]), weight, eps=eps)
    if values is not input:
        input.copy_(values)
    if total is not residual:
        residual.copy_(total)
