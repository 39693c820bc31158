"""Plain rows, as in `rapid_llm.verify.plain`, of linear with its neighbours, and the faults that they know."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from rapid_llm.verify.plain import give, shorten

_OF_NORM: Final = (
    ("eps constant", "fp32"),
    ("eps constant", "bf16"),
    ("eps outside", "bf16"),
    ("eps ignored", "fp16"),
    ("norm weight ignored", "bf16"),
    ("norm weight plus one", "fp32"),
    ("norm weight through bf16", "fp32"),
    ("padded width", "bf16"),
    ("squares of a part", "bf16"),
    ("squares of the scaled row", "bf16"),
    ("not normalised", "bf16"),
    ("last column dropped", "bf16"),
    ("tf32", "fp32"),
    ("accumulates in fp16", "fp16"),
    ("accumulates in bf16", "bf16"),
)
"""Faults of a product of the normalised row."""

FAULTS: Final = MappingProxyType(
    {
        "linear_add": tuple(
            (fault, dtype, None)
            for fault, dtype in (
                ("residual forgotten", "bf16"),
                ("residual added twice", "fp32"),
                ("residual of the next output", "bf16"),
                ("product rounded first", "bf16"),
                ("product rounded first", "fp16"),
                ("subtracted", "fp32"),
                ("last column dropped", "bf16"),
                ("tf32", "fp32"),
                ("accumulates in fp16", "fp16"),
                ("accumulates in bf16", "bf16"),
            )
        ),
        "rmsnorm_linear": tuple(
            (fault, dtype, None) for fault, dtype in (*_OF_NORM, ("bias ignored", "bf16"), ("bias normalised", "bf16"))
        ),
        "rmsnorm_linear_silu_and_mul": tuple(
            (fault, dtype, None)
            for fault, dtype in (
                *_OF_NORM,
                ("gate and up swapped", "bf16"),
                ("gate and up interleaved", "bf16"),
                ("gelu", "bf16"),
                ("exp overflows", "fp32"),
                ("gate not normalised", "bf16"),
                ("up not normalised", "bf16"),
            )
        ),
    }
)
"""op -> (fault, dtype and scheme where it shows)."""


def linear_add(input: Tensor, weight: Tensor, residual: Tensor, *, fault: str = "") -> None:
    product = _product(input.float(), weight.float(), fault)
    if fault == "product rounded first":
        product = product.to(residual.dtype).float()
    if fault == "subtracted":
        product = -product
    kept = residual.float()
    if fault == "residual of the next output":
        kept = kept.roll(-1, -1)
    factor = {"residual forgotten": 0.0, "residual added twice": 2.0}.get(fault, 1.0)
    residual.copy_(product + (kept * factor if factor else torch.zeros_like(kept)))


def rmsnorm_linear(
    input: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
    *,
    fault: str = "",
) -> Tensor:
    x = input.float()
    root = _inverse_root(x, norm_weight.float(), eps, fault)
    total = _product(_scaled(x, norm_weight, fault), weight.float(), fault)
    if bias is not None and fault == "bias normalised":
        total = total + bias.float()
    total = total * root
    if bias is not None and fault not in ("bias ignored", "bias normalised"):
        total = total + bias.float()
    return give(total, out, input.dtype)


def rmsnorm_linear_silu_and_mul(
    input: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    *,
    fault: str = "",
) -> Tensor:
    x = input.float()
    root = _inverse_root(x, norm_weight.float(), eps, fault)
    both = _product(_scaled(x, norm_weight, fault), weight.float(), fault)
    gate, up = both.chunk(2, -1)
    if fault == "gate and up interleaved":
        gate, up = both[..., 0::2], both[..., 1::2]
    elif fault == "gate and up swapped":
        gate, up = up, gate
    gate = gate if fault == "gate not normalised" else gate * root
    up = up if fault == "up not normalised" else up * root
    if fault == "gelu":
        silu = torch.nn.functional.gelu(gate)
    elif fault == "exp overflows":
        silu = gate * (gate.exp() / (1 + gate.exp()))
    else:
        silu = gate / (1 + torch.exp(-gate))
    return give(silu * up, out, input.dtype)


def _scaled(x: Tensor, norm_weight: Tensor, fault: str) -> Tensor:
    """The row times the norm's weight, to be normalised when it is summed."""
    scale = norm_weight.float()
    if fault == "norm weight ignored":
        return x
    if fault == "norm weight plus one":
        return x * (scale + 1)
    if fault == "norm weight through bf16":
        return x * scale.bfloat16().float()
    return x * scale


def _inverse_root(x: Tensor, scale: Tensor, eps: float, fault: str) -> Tensor:
    width = x.shape[-1]
    if fault == "not normalised":
        return torch.ones_like(x[..., :1]) if width else torch.ones(*x.shape[:-1], 1)
    squares = x * scale * (x * scale) if fault == "squares of the scaled row" else x * x
    if fault == "squares of a part":
        squares = squares[..., : (width + 1) // 2]
    if fault == "padded width":
        width = 1 << (width - 1).bit_length()
    mean = squares.sum(-1, keepdim=True) / max(width, 1)
    if fault == "eps outside":
        return 1 / (mean.sqrt() + eps)
    if fault == "eps ignored":
        return mean.rsqrt()
    return torch.rsqrt(mean + (1e-6 if fault == "eps constant" else eps))


def _product(x: Tensor, w: Tensor, fault: str) -> Tensor:
    if fault == "last column dropped":
        x, w = x[..., :-1], w[:, :-1]
    elif fault == "tf32":
        x, w = shorten(x, 13), shorten(w, 13)
    if fault not in ("accumulates in fp16", "accumulates in bf16"):
        return x @ w.T
    dtype = torch.float16 if fault.endswith("fp16") else torch.bfloat16
    total = torch.zeros(*x.shape[:-1], w.shape[0])
    for start in range(0, x.shape[-1], 8):
        total = (total + x[..., start : start + 8] @ w[:, start : start + 8].T).to(dtype).float()
    return total
