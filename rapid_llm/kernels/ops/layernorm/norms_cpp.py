"""`cpp/rmsnorm` and `cpp/fused_add_rmsnorm`: one C++ call each for dense fp32 rows; see csrc/layernorm/norms.cpp."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import function, load_cpp
from rapid_llm.kernels.ops.arguments import check_alias, check_disjoint, check_host, check_tensor
from rapid_llm.kernels.registry import ArgumentError

_library: Final = load_cpp("norms", "layernorm/norms.cpp")
_rmsnorm: Final = function(_library, "rmsnorm", "ppfnnpi")
_fused_add_rmsnorm: Final = function(_library, "fused_add_rmsnorm", "pppfnni")


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    """rmsnorm of contiguous fp32 rows; `out` may be `input`. See the op."""
    hidden, weight = _check("rmsnorm", input, weight)
    if out is None:
        out = torch.empty(input.shape)
    else:
        check_tensor("rmsnorm", "out", out, input, input.shape)
        check_alias("rmsnorm", out, "input", input)
        if not out.is_contiguous():
            raise ArgumentError(f"rmsnorm: out must be contiguous, strides are {out.stride()}")
    rows = input.numel() // hidden if hidden else 0
    _rmsnorm(input.data_ptr(), weight.data_ptr(), eps, rows, hidden, out.data_ptr(), torch.get_num_threads())
    return out


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """fused_add_rmsnorm of contiguous fp32 rows, in place; see the op."""
    hidden, weight = _check("fused_add_rmsnorm", input, weight)
    if residual.shape != input.shape or residual.dtype is not torch.float32 or not residual.is_contiguous():
        check_tensor("fused_add_rmsnorm", "residual", residual, input, input.shape)
        raise ArgumentError(f"fused_add_rmsnorm: residual must be contiguous, strides are {residual.stride()}")
    check_host("fused_add_rmsnorm", residual)
    check_disjoint("fused_add_rmsnorm", "input", input, "residual", residual)
    rows = input.numel() // hidden if hidden else 0
    _fused_add_rmsnorm(
        *(input.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, rows, hidden, torch.get_num_threads())
    )


def _check(op: str, input: Tensor, weight: Tensor) -> tuple[int, Tensor]:
    """The length of a row, and the weight as dense fp32; raises `ArgumentError` for what these rows do not take."""
    check_host(op, input, weight)
    if input.dim() == 0:
        raise ArgumentError(f"{op}: input must have a last dimension, got a scalar")
    hidden = input.shape[-1]
    good = input.dtype is torch.float32 and weight.dtype.is_floating_point and weight.shape == (hidden,)
    if not (good and input.is_contiguous()):
        raise ArgumentError(
            f"{op}: needs contiguous float32 input on CPU and a weight of the same shape as its rows, ({hidden},): got "
            f"{input.dtype}, strides {input.stride()} and {weight.dtype}, {tuple(weight.shape)}"
        )
    if weight.dtype is torch.float32 and weight.is_contiguous():
        return hidden, weight
    return hidden, weight.to(torch.float32).contiguous()
