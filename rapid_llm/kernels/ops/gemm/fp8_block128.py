"""Weights of scheme `fp8_block128`: how a checkpoint's codes and scales become rows of bytes, and the way back."""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import FP8, GROUP, row_bytes, row_elements
from rapid_llm.kernels.registry import ArgumentError


def pack(codes: Tensor, scales: Tensor) -> Tensor:
    """(rows, columns) float8_e4m3fn and a scale for each 128 by 128 block, to (rows, bytes) uint8.

    scales: (ceil(rows / 128), columns / 128), any float dtype, kept as fp32: `weight_scale_inv` of a DeepSeek
    checkpoint.
    """
    rows, columns = codes.shape
    if codes.dtype is not torch.float8_e4m3fn or columns % GROUP:
        raise ArgumentError(
            f"{FP8}: the codes must be float8_e4m3fn in rows of a multiple of {GROUP}, "
            f"got {codes.dtype} {(rows, columns)}"
        )
    wanted = (-(-rows // GROUP), columns // GROUP)
    if scales.shape != wanted or scales.device != codes.device:
        raise ArgumentError(
            f"{FP8}: {(rows, columns)} codes on {codes.device} take scales of shape {wanted} there, "
            f"got {tuple(scales.shape)} on {scales.device}"
        )
    packed = torch.zeros(rows, row_bytes(columns, FP8), dtype=torch.uint8, device=codes.device)
    packed[:, :columns] = codes.view(torch.uint8)
    each = scales.float().repeat_interleave(GROUP, 0)[:rows].contiguous()
    packed[:, columns : columns + 4 * wanted[1]] = each.view(torch.uint8)
    return packed


def codes_of(weight: Tensor) -> Tensor:
    """The codes of packed rows, (rows, columns) float8_e4m3fn; a view where the last dimension is contiguous."""
    codes = weight[:, : row_elements(weight.shape[1], FP8)]
    if weight.stride(1) != 1:
        codes = codes.contiguous()
    return codes.view(torch.float8_e4m3fn)


def scales_of(weight: Tensor) -> Tensor:
    """The scales of each packed row, (rows, columns / 128) fp32, contiguous."""
    columns = row_elements(weight.shape[1], FP8)
    # Copied out first, for they may lie at odd addresses.
    raw = weight[:, columns : columns + columns // GROUP * 4].clone(memory_format=torch.contiguous_format)
    return raw.view(torch.float32)


def dequantise(weight: Tensor) -> Tensor:
    """Packed rows of any strides to (rows, columns) fp32, contiguous; each weight is rounded once."""
    scales = scales_of(weight)
    values = codes_of(weight).float().unflatten(1, (scales.shape[1], GROUP))
    return values.mul_(scales.unsqueeze(2)).flatten(1)
