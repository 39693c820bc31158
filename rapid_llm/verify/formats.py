"""Formats of quantised weights in float64: dequantisation for the oracles, and random weights for the cases."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import BLOCK, BLOCK_BYTES, FP8, GROUP, row_bytes, row_elements


class Blocks(NamedTuple):
    """A quantised matrix taken apart, in float64: w = scale * quant + offset.

    quant: (rows, blocks, 32), signed for q8_0 and q4_0 (8 already taken off), 0 to 15 for q4_1; (rows, groups, 128) the
    values of the codes for fp8_block128. scale, offset: (rows, blocks, 1); offset is 0 but for q4_1.
    """

    quant: Tensor
    scale: Tensor
    offset: Tensor

    def values(self) -> Tensor:
        """The exact weights, (rows, weights)."""
        return (self.quant * self.scale + self.offset).flatten(1)


def unpack(data: Tensor, scheme: str) -> Blocks:
    """Take (rows, bytes) uint8 blocks apart; raises `ValueError` for another scheme or a broken last block."""
    if scheme == FP8:
        return _unpack_fp8(data)
    if scheme not in BLOCK_BYTES:
        raise ValueError(f"scheme {scheme!r} is no block format; known: {', '.join((*BLOCK_BYTES, FP8))}")
    size = BLOCK_BYTES[scheme]
    rows, width = data.shape
    if width % size:
        raise ValueError(f"{scheme}: a row of {width} bytes does not divide into {size}-byte blocks")
    blocks = data.contiguous().reshape(rows, width // size, size)

    def half(start: int) -> Tensor:
        return blocks[..., start : start + 2].contiguous().view(torch.float16).to(torch.float64)

    zero = torch.zeros(rows, width // size, 1, dtype=torch.float64, device=data.device)
    if scheme == "q8_0":
        return Blocks(blocks[..., 2:].contiguous().view(torch.int8).to(torch.float64), half(0), zero)
    packed = blocks[..., size - BLOCK // 2 :].to(torch.int64)
    quant = torch.cat((packed & 15, packed >> 4), dim=-1).to(torch.float64)
    if scheme == "q4_0":
        return Blocks(quant - 8.0, half(0), zero)
    return Blocks(quant, half(0), half(2))


def _unpack_fp8(data: Tensor) -> Blocks:
    """e4m3 by its definition: sign, four bits of exponent with bias 7, three of fraction; all ones but the sign is
    NaN."""
    rows, columns = data.shape[0], row_elements(data.shape[1], FP8)
    codes = data[:, :columns].to(torch.int64).reshape(rows, columns // GROUP, GROUP)
    exponent, fraction = codes >> 3 & 15, (codes & 7).to(torch.float64)
    normal = (8 + fraction) * torch.exp2((exponent - 10).to(torch.float64))
    value = torch.where(exponent > 0, normal, fraction * 2.0**-9)
    value = torch.where(codes & 127 == 127, float("nan"), value)
    scale = data[:, columns : columns + columns // GROUP * 4].clone(memory_format=torch.contiguous_format)
    scale = scale.view(torch.float32).to(torch.float64)[..., None]
    return Blocks(torch.where(codes >= 128, -value, value), scale, torch.zeros_like(scale))


def dequantise(data: Tensor, scheme: str) -> Tensor:
    """The exact weights of (rows, bytes) uint8 blocks: (rows, weights) float64."""
    return unpack(data, scheme).values()


def random_blocks(
    generator: torch.Generator, rows: int, elements: int, scheme: str, *, exact: bool = False, spread: float = 1.0
) -> Tensor:
    """(rows, bytes) uint8 blocks with random codes and weights of about `spread` in size.

    exact: scales are 1 and offsets small integers, so that sums over integer inputs have no rounding error at all.
    """
    if scheme == FP8:
        return _random_fp8(generator, rows, elements, exact=exact, spread=spread)
    if elements % BLOCK:
        raise ValueError(f"{scheme}: {elements} weights do not fill blocks of {BLOCK}")
    blocks, size = elements // BLOCK, BLOCK_BYTES[scheme]
    data = torch.randint(0, 256, (rows, blocks, size), generator=generator, dtype=torch.uint8)
    reach = 127.0 if scheme == "q8_0" else 8.0
    if exact:
        scale = torch.ones(rows, blocks, 1)
        offset = torch.randint(-8, 9, (rows, blocks, 1), generator=generator).to(torch.float32)
    else:
        sign = torch.randint(0, 2, (rows, blocks, 1), generator=generator) * 2.0 - 1.0
        scale = (torch.rand(rows, blocks, 1, generator=generator) + 0.25) * sign * (spread / reach)
        offset = torch.randn(rows, blocks, 1, generator=generator) * spread
    data[..., 0:2] = scale.to(torch.float16).view(torch.uint8)
    if scheme == "q4_1":
        data[..., 2:4] = offset.to(torch.float16).view(torch.uint8)
    return data.reshape(rows, blocks * size)


def _random_fp8(generator: torch.Generator, rows: int, elements: int, *, exact: bool, spread: float) -> Tensor:
    """Codes of every kind but NaN, of which small ones are as likely as large ones; one scale for each 128 rows."""
    data = torch.zeros(rows, row_bytes(elements, FP8), dtype=torch.uint8)
    shape = (-(-rows // GROUP), elements // GROUP)
    if exact:
        values = torch.randint(-8, 9, (rows, elements), generator=generator).to(torch.float32)
        codes, scale = values.to(torch.float8_e4m3fn).view(torch.uint8), torch.ones(shape)
    else:
        codes = torch.randint(0, 127, (rows, elements), generator=generator, dtype=torch.uint8)
        codes |= torch.randint(0, 2, codes.shape, generator=generator, dtype=torch.uint8) << 7
        sign = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0
        scale = (torch.rand(shape, generator=generator) + 0.25) * sign * (spread / 64.0)
    data[:, :elements] = codes
    each = scale.repeat_interleave(GROUP, 0)[:rows].contiguous()
    data[:, elements : elements + 4 * shape[1]] = each.view(torch.uint8)
    return data
