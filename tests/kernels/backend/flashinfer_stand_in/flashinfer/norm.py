"""RMSNorm and its fusion with the addition; the weight has the input's dtype."""

import torch

from ._demands import dense, rows, some


def _norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return values / (values.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    assert input.dim() in (2, 3)
    assert out is not None
    assert out.shape == input.shape
    assert weight.dtype == input.dtype == out.dtype
    some(input)
    for tensor in (input, out):
        rows(tensor, 64)
    dense(weight)
    out.copy_(_norm(input.double(), weight, eps))
    return out


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    assert input.dim() == 2
    assert weight.dtype == input.dtype == residual.dtype
    some(input)
    for tensor in (input, residual):
        rows(tensor, 64)
    dense(weight)
    total = input.double() + residual.double()
    residual.copy_(total)
    input.copy_(_norm(total, weight, eps))
