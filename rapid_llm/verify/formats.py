"""GGUF block formats in float64: dequantisation for the oracles, and random blocks for the cases."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import BLOCK, BLOCK_BYTES


class Blocks(NamedTuple):
    """A quantised matrix taken apart, in float64: w = scale * quant + offset.

    quant: (rows, blocks, 32), signed for q8_0 and q4_0 (8 already taken off), 0 to 15 for q4_1.
    scale, offset: (rows, blocks, 1); offset is 0 for q8_0 and q4_0.
    """

    quant: Tensor
    scale: Tensor
    offset: Tensor

    def values(self) -> Tensor:
        """The exact weights, (rows, blocks * 32)."""
        return (self.quant * self.scale + self.offset).flatten(1)


def unpack(data: Tensor, scheme: str) -> Blocks:
    """Take (rows, bytes) uint8 blocks apart; raises `ValueError` for another scheme or a broken last block."""
    if scheme not in BLOCK_BYTES:
        raise ValueError(f"scheme {scheme!r} is no block format; known: {', '.join(BLOCK_BYTES)}")
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


def dequantise(data: Tensor, scheme: str) -> Tensor:
    """The exact weights of (rows, bytes) uint8 blocks: (rows, weights) float64."""
    return unpack(data, scheme).values()


def random_blocks(
    generator: torch.Generator, rows: int, elements: int, scheme: str, *, exact: bool = False, spread: float = 1.0
) -> Tensor:
    """(rows, bytes) uint8 blocks with random codes and weights of about `spread` in size.

    exact: scales are 1 and offsets small integers, so that sums over integer inputs have no rounding error at all.
    """
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
