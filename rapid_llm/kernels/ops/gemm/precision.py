"""fp32 means fp32: whether torch's own GEMM may round fp32 operands, and what to do then."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_FULL: Final = ("none", "ieee")
_CPU: Final = torch.backends.mkldnn.matmul
_CUDA: Final = torch.backends.cuda.matmul


def rounds_fp32(tensor: Tensor) -> bool:
    """Whether torch may compute a product of `tensor`, if that is fp32, by TF32 or bf16.

    Asked on every call, about 1 us: the setting is the user's and may change at any time
    (`torch.set_float32_matmul_precision`).
    """
    setting = _CUDA if tensor.is_cuda else _CPU
    return tensor.dtype is torch.float32 and setting.fp32_precision not in _FULL


def exact_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, through fp64 where torch would round fp32 operands."""
    if not rounds_fp32(input):
        return F.linear(input, weight, bias)
    return F.linear(input.double(), weight.double(), None if bias is None else bias.double()).float()
