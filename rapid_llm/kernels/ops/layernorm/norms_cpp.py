"""`cpp/rmsnorm` and `cpp/fused_add_rmsnorm`: one C++ call each for dense fp32 rows; see csrc/layernorm/norms.cpp."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import load_cpp

_library: Final = load_cpp("norms", "layernorm/norms.cpp")


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    """rmsnorm of contiguous fp32 rows; `out` may be `input`. See the op."""
    if out is None:
        out = torch.empty_like(input)
    _library.rmsnorm(out, input, _dense(weight), eps, torch.get_num_threads())
    return out


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """fused_add_rmsnorm of contiguous fp32 rows, in place; see the op."""
    _library.fused_add_rmsnorm(input, residual, _dense(weight), eps, torch.get_num_threads())


def _dense(weight: Tensor) -> Tensor:
    """The weight as dense fp32; one of integers stays as it is, to be refused."""
    if (weight.dtype is torch.float32 and weight.is_contiguous()) or not weight.dtype.is_floating_point:
        return weight
    return weight.to(torch.float32).contiguous()
