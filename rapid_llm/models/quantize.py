"""Dense weights to quantised rows, at load: what `quantization="int8" | "int4" | "fp8"` means.

Every code is the nearest to its weight, by the scales that make the largest magnitude of a row, or the range of a
group, just fit; nothing is calibrated. How far a weight may move by that is stated with each scheme below.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import FORMATS, FP8_CHANNEL, INT4_GROUPS, INT8_CHANNEL, row_bytes
from rapid_llm.kernels.ops.gemm import scaled_rows

QUANTIZATIONS: Final = MappingProxyType(
    {"int8": (INT8_CHANNEL,), "int4": ("int4_group64", "int4_group32"), "fp8": (FP8_CHANNEL,)}
)
"""What a user asks for -> the schemes that it stands for; the first whose groups divide a row is taken."""

FP8_MAX: Final = 448.0
"""The largest number of e4m3."""

PIECE: Final = 2**22
"""Weights quantised at a time: 16 MiB of fp32, and a few times that in passing."""


def scheme_for(quantization: str, in_features: int) -> str | None:
    """The scheme that `quantization` gives a matrix of such rows; None where no scheme of it divides them.

    Raises `ValueError` for an unknown quantisation.
    """
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    return next((s for s in QUANTIZATIONS[quantization] if in_features % FORMATS[s].weights == 0), None)


def pack_fp8_channel(weight_or_codes: Tensor, scale: Tensor) -> Tensor:
    """(rows, columns) e4m3 codes, or weights that are divided by their scales first, as rows of `fp8_channel`.

    scale: fp32, one for each row, or a single one for all.
    """
    codes = weight_or_codes
    if codes.dtype is not torch.float8_e4m3fn:
        codes = _divided(codes, scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return scaled_rows.pack_channel(codes, scale, FP8_CHANNEL)


def pack_int8_channel(weight_or_codes: Tensor, scale: Tensor) -> Tensor:
    """(rows, columns) int8 codes, or weights that are divided by their scales first, as rows of `int8_channel`.

    scale: fp32, one for each row, or a single one for all.
    """
    codes = weight_or_codes
    if codes.dtype is not torch.int8:
        codes = _divided(codes, scale).round_().clamp_(-127, 127).to(torch.int8)
    return scaled_rows.pack_channel(codes, scale, INT8_CHANNEL)


pack_int4_group = scaled_rows.pack_groups


def quantize(dense: Tensor, scheme: str) -> Tensor:
    """(rows, columns) of any float dtype to rows of `scheme`, (rows, bytes) uint8 on the same device.

    With d the scale that is stored, a weight w comes back as w' with, up to fp32's roundings,
    int8_channel: d = max |w| of the row / 127, |w' - w| <= d / 2;
    fp8_channel: d = max |w| of the row / 448, |w' - w| <= max(|w| / 16, d / 1024);
    int4_group32, 64, 128: d = (max(w, 0) - min(w, 0)) of the group / 15 in fp16, |w' - w| <= d / 2 + 2**-20.

    Raises `ValueError` for another scheme, for rows that its groups do not divide, and for weights that are not finite
    or, in int4, need a scale beyond fp16.
    """
    if scheme not in _QUANTIZERS:
        raise ValueError(f"no weights are quantised to {scheme!r}; known: {', '.join(_QUANTIZERS)}")
    rows, columns = dense.shape
    packed = torch.empty(rows, row_bytes(columns, scheme), dtype=torch.uint8, device=dense.device)
    count = max(1, PIECE // max(columns, 1))
    for first in range(0, rows, count):
        part = dense[first : first + count].float()
        if not bool(torch.isfinite(part).all()):
            raise ValueError(f"{scheme}: a weight is NaN or infinite in rows {first} to {first + part.shape[0] - 1}")
        packed[first : first + count] = _QUANTIZERS[scheme](part, scheme)
    return packed


def _divided(weight: Tensor, scale: Tensor) -> Tensor:
    """weight / scale by rows, in fp32; 0 where the scale is 0, as it is for a row of zeros."""
    each = scale.float().reshape(-1, 1)
    return torch.where(each != 0, weight.float() / each, 0.0)


def _int8(weight: Tensor, scheme: str) -> Tensor:
    return pack_int8_channel(weight, weight.abs().amax(1) / 127)


def _fp8(weight: Tensor, scheme: str) -> Tensor:
    return pack_fp8_channel(weight, weight.abs().amax(1) / FP8_MAX)


def _int4(weight: Tensor, scheme: str) -> Tensor:
    """The range of a group is widened to hold 0, so that its zero point is a small number that fp16 has to 2**-8."""
    groups = weight.unflatten(1, (-1, INT4_GROUPS[scheme]))
    low, high = groups.amin(2, keepdim=True).clamp_max(0), groups.amax(2, keepdim=True).clamp_min(0)
    scale = ((high - low) / 15).half().float()
    if not bool(torch.isfinite(scale).all()):
        raise ValueError(
            f"{scheme}: the weights of a group span {float((high - low).max()):g}, more than fp16's scales"
        )
    zero = torch.where(scale > 0, -low / scale, 0.0).clamp_max(15).half().float()
    codes = torch.where(scale > 0, groups / scale + zero, zero).round_().clamp_(0, 15).to(torch.uint8)
    return scaled_rows.pack_groups(codes.flatten(1), scale.squeeze(2), zero.squeeze(2), INT4_GROUPS[scheme])


_QUANTIZERS: Final[dict[str, Callable[[Tensor, str], Tensor]]] = {
    INT8_CHANNEL: _int8,
    FP8_CHANNEL: _fp8,
    **dict.fromkeys(INT4_GROUPS, _int4),
}
