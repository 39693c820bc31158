"""`linear` by DeepGEMM: the input is quantised to fp8, one scale for each token and 128 features, then multiplied."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.backend.deepgemm import LIBRARY
from rapid_llm.kernels.backend.deepgemm.weight import BlockScaled
from rapid_llm.kernels.ops.arguments import check_tensor
from rapid_llm.kernels.ops.block_formats import GROUP
from rapid_llm.kernels.registry import ArgumentError

DENSE: Final = "unquantized"
"""The op's default scheme; a packed weight knows what it is."""

_fp8_gemm_nt: Final = LIBRARY.function("fp8_gemm_nt")

LARGEST: Final = 448.0
"""The largest fp8 e4m3 number."""

SMALLEST: Final = 1e-30
"""A group of no larger values becomes 0 in part, so that the inverse of its scale stays finite."""


def linear(
    input: Tensor, weight: BlockScaled, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = DENSE
) -> Tensor:
    """input @ weight.T for a weight packed by `deepgemm.weight.pack`; sums in fp32, rounded once. No bias."""
    outputs, features = weight.codes.shape
    if input.dim() == 0 or input.shape[-1] != features or input.dtype is not torch.bfloat16:
        raise ArgumentError(
            f"linear: deepgemm takes bfloat16 input of {features} features, as the packed weight: got "
            f"{tuple(input.shape)} {input.dtype}"
        )
    if bias is not None:
        raise ArgumentError("linear: deepgemm rounds the product to bfloat16 before a bias could be added; pass none")
    shape = (*input.shape[:-1], outputs)
    if out is not None:
        check_tensor("linear", "out", out, input, shape)
    fits = out is not None and out.is_contiguous()
    product = out.view(-1, outputs) if out is not None and fits else input.new_empty(input.numel() // features, outputs)
    if product.numel():
        _fp8_gemm_nt(quantise(input.reshape(-1, features)), (weight.codes, weight.scales), product)
    if out is None:
        return product.view(shape)
    return out if fits else out.copy_(product.view(shape))


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, features) to float8_e4m3fn codes and (tokens, features / 128) fp32 scales: largest magnitude / 448."""
    groups = rows.float().unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(2).clamp_min(SMALLEST) / LARGEST
    codes = (groups / scales.unsqueeze(2)).to(torch.float8_e4m3fn)
    return codes.flatten(1), scales
