"""Weights whose codes come first in a row, and their scales after them: one scale a row, or one for each group.

`fp8_channel`, `int8_channel`: a byte a weight (e4m3, int8), then an fp32 scale d; w = d*q. `int4_group32`, `64`, `128`:
two weights a byte, the first in the low nibble, then for each group an fp16 scale d and an fp16 zero point z in units
of codes; w = d*(q - z), q from 0 to 15. Rows are padded with zeros to a multiple of 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import FORMATS, FP8_CHANNEL, INT4_GROUPS, INT8_CHANNEL, row_bytes, row_elements
from rapid_llm.kernels.registry import ArgumentError

CODES = {FP8_CHANNEL: torch.float8_e4m3fn, INT8_CHANNEL: torch.int8}
"""The dtype of the codes of a scheme with one scale a row."""


def pack_channel(codes: Tensor, scales: Tensor, scheme: str) -> Tensor:
    """(rows, columns) float8_e4m3fn or int8, as `scheme` has them, and a scale for each row: (rows, bytes) uint8.

    scales: rows of them, or a single one for all, in any float dtype, kept as fp32. columns: a multiple of 16.
    """
    rows, columns = _sizes(codes, scheme)
    if codes.dtype is not CODES[scheme]:
        raise ArgumentError(f"{scheme}: the codes must be {CODES[scheme]}, got {codes.dtype}")
    if scales.numel() not in (1, rows) or scales.device != codes.device:
        raise ArgumentError(
            f"{scheme}: {rows} rows on {codes.device} take one scale each, or one for all, there: got "
            f"{tuple(scales.shape)} on {scales.device}"
        )
    packed = torch.zeros(rows, row_bytes(columns, scheme), dtype=torch.uint8, device=codes.device)
    packed[:, :columns] = codes.view(torch.uint8)
    each = torch.empty(rows, 1, device=codes.device).copy_(scales.reshape(-1, 1))  # dense, which a view may not be
    packed[:, columns : columns + 4] = each.view(torch.uint8)
    return packed


def pack_groups(codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """(rows, columns) uint8 codes of 0 to 15 and (rows, columns / group) scales and zero points: (rows, bytes) uint8.

    Scales and zero points become fp16; group: 32, 64 or 128, of which columns are a multiple.
    """
    _sizes(codes, f"int4_group{group}")
    if codes.dtype is not torch.uint8:
        raise ArgumentError(f"int4_group{group}: the codes must be uint8, got {codes.dtype}")
    return join_groups(codes[:, ::2] | (codes[:, 1::2] << 4), scales, zeros, group)


def join_groups(pairs: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """As `pack_groups`, of codes that are two to a byte already, the first in the low nibble: (rows, columns / 2)."""
    scheme = f"int4_group{group}"
    if scheme not in INT4_GROUPS:
        raise ArgumentError(f"a group of {group} is not one of {', '.join(map(str, INT4_GROUPS.values()))}")
    rows, half = pairs.shape
    wanted = (rows, 2 * half // group)
    for name, tensor in (("scales", scales), ("zeros", zeros)):
        if tensor.shape != wanted or tensor.device != pairs.device:
            raise ArgumentError(
                f"{scheme}: {(rows, 2 * half)} codes on {pairs.device} take {name} of shape {wanted} there, got "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
    packed = torch.zeros(rows, row_bytes(2 * half, scheme), dtype=torch.uint8, device=pairs.device)
    packed[:, :half] = pairs
    both = torch.stack((scales.half(), zeros.half()), 2).flatten(1)
    packed[:, half : half + 4 * wanted[1]] = both.view(torch.uint8)
    return packed


def dequantise(weight: Tensor, scheme: str) -> Tensor:
    """Packed rows of any strides to (rows, columns) fp32, contiguous.

    A weight of one scale a row is rounded once; q - z is exact for zero points that are integers, else rounded too.
    """
    columns = row_elements(weight.shape[1], scheme)
    if scheme in CODES:
        codes = _copied(weight, 0, columns).view(CODES[scheme]).float()
        return codes.mul_(_copied(weight, columns, 4).view(torch.float32))
    group, at = FORMATS[scheme].weights, columns // 2
    blocks = (weight.shape[0], columns // group)
    pairs = _copied(weight, at, 4 * blocks[1]).view(torch.float16).float().view(*blocks, 1, 2)
    packed = weight[:, :at]
    codes = torch.stack((packed & 15, packed >> 4), 2).float().view(*blocks, group)
    return codes.sub_(pairs[..., 1]).mul_(pairs[..., 0]).flatten(1)


def _copied(weight: Tensor, start: int, count: int) -> Tensor:
    """`count` bytes of each row, copied out: they may lie at odd addresses."""
    return weight[:, start : start + count].clone(memory_format=torch.contiguous_format)


def _sizes(codes: Tensor, scheme: str) -> tuple[int, int]:
    if scheme not in FORMATS:
        raise ArgumentError(f"unknown scheme {scheme!r}; known: {', '.join((*CODES, *INT4_GROUPS))}")
    multiple = FORMATS[scheme].weights
    if codes.dim() != 2 or codes.shape[1] % multiple:
        raise ArgumentError(
            f"{scheme}: the codes must be (rows, columns) with columns a multiple of {multiple}, got "
            f"{tuple(codes.shape)}"
        )
    return codes.shape[0], codes.shape[1]
