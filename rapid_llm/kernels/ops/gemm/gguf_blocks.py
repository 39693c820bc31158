"""GGUF's younger block formats in plain PyTorch, on any device and inside a CUDA graph.

Every code is a few bits of a byte, and codes that lie in the same bits of neighbouring bytes are neighbours: `_spread`
takes such fields apart for all formats. Products of scales and codes are exact in fp32 (fp16 scales of 11 bits, times
6 or 7 bits, times at most 5), so each weight is rounded once, where a minimum is added. Source: the layout of blocks
and the order of weights in them as ggml's `ggml-common.h` and `dequantize_row_*` define them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

IQ4_NL: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of iq4_nl's codes."""


def _spread(data: Tensor, group: int, bits: int, count: int) -> Tensor:
    """Fields of `bits` bits of (blocks, bytes) uint8, `count` of each byte, lowest first: (blocks, bytes * count).

    The fields at one place of `group` bytes come together, before those at the next place.
    """
    steps = torch.arange(0, bits * count, bits, dtype=torch.uint8, device=data.device).view(-1, 1)
    blocks, size = data.shape
    fields = (data.reshape(blocks, size // group, 1, group) >> steps).bitwise_and_((1 << bits) - 1)
    return fields.view(blocks, size * count)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 at byte `at` of each block: (blocks, 1) fp32."""
    return blocks[:, at : at + 2].clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def _scaled(codes: Tensor, scale: Tensor, minimum: Tensor | None = None) -> Tensor:
    """codes (blocks, weights), of which scale and minimum (blocks, groups) hold a number for each group: fp32."""
    values = codes.float().view(*scale.shape, codes.shape[1] // scale.shape[1]).mul_(scale.unsqueeze(2))
    return (values if minimum is None else values.sub_(minimum.unsqueeze(2))).flatten(1)


def _five_bits(low: Tensor, high: Tensor) -> Tensor:
    """Nibbles of 16 bytes with a fifth bit from 4 bytes: weight i has bit i."""
    return _spread(low, 16, 4, 2).bitwise_or_(_spread(high, 1, 1, 8) << 4)


def _q5_0(b: Tensor) -> Tensor:
    """fp16 d, 4 bytes of high bits, 16 of nibbles; w = d*(q - 16)."""
    return _scaled(_five_bits(b[:, 6:], b[:, 2:6]).float().sub_(16), _half(b, 0))


def _q5_1(b: Tensor) -> Tensor:
    """fp16 d, fp16 m, 4 bytes of high bits, 16 of nibbles; w = d*q + m."""
    return _scaled(_five_bits(b[:, 8:], b[:, 4:8]), _half(b, 0), -_half(b, 2))


def _iq4_nl(b: Tensor) -> Tensor:
    """fp16 d, 16 bytes of nibbles; w = d*IQ4_NL[q]. The table is made of fills, which a CUDA graph can record."""
    table = torch.cat([torch.full((1, 1), float(value), device=b.device) for value in IQ4_NL])
    codes = torch.embedding(table, _spread(b[:, 2:], 16, 4, 2).int()).squeeze(2)
    return _scaled(codes, _half(b, 0))


def _q2_k(b: Tensor) -> Tensor:
    """16 bytes (scale in the low nibble, minimum in the high one), 64 of codes, fp16 d, fp16 dmin."""
    parts = b[:, :16]
    scale, minimum = (parts & 15).float().mul_(_half(b, 80)), (parts >> 4).float().mul_(_half(b, 82))
    return _scaled(_spread(b[:, 16:80], 32, 2, 4), scale, minimum)


def _q3_k(b: Tensor) -> Tensor:
    """32 bytes of high bits (unset: 4 is taken off), 64 of low bits, 12 of scales with 6 bits less 32, fp16 d."""
    scale = _spread(b[:, 96:104], 8, 4, 2).bitwise_or_(_spread(b[:, 104:108], 4, 2, 4) << 4)
    codes = _spread(b[:, 32:96], 32, 2, 4).bitwise_or_(_spread(b[:, :32], 32, 1, 8) << 2)
    return _scaled(codes.float().sub_(4), scale.float().sub_(32).mul_(_half(b, 108)))


def _six_bits(parts: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 minima of 6 bits from 12 bytes: the first four of each lie whole in bytes 0-3 and 4-7, whose two
    top bits are those of the others, which have their nibbles in bytes 8-11."""
    scale, minimum, rest = parts[:, :4], parts[:, 4:8], parts[:, 8:12]
    scales = torch.cat((scale & 63, (rest & 15) | ((scale >> 2) & 48)), 1)
    return scales.float(), torch.cat((minimum & 63, (rest >> 4) | ((minimum >> 2) & 48)), 1).float()


def _q4_k(b: Tensor) -> Tensor:
    """fp16 d, fp16 dmin, 12 bytes of scales and minima, 128 of nibbles."""
    scale, minimum = _six_bits(b[:, 4:16])
    return _scaled(_spread(b[:, 16:], 32, 4, 2), scale.mul_(_half(b, 0)), minimum.mul_(_half(b, 2)))


def _q5_k(b: Tensor) -> Tensor:
    """As q4_k, with 32 bytes of high bits before the nibbles."""
    scale, minimum = _six_bits(b[:, 4:16])
    codes = _spread(b[:, 48:], 32, 4, 2).bitwise_or_(_spread(b[:, 16:48], 32, 1, 8) << 4)
    return _scaled(codes, scale.mul_(_half(b, 0)), minimum.mul_(_half(b, 2)))


def _q6_k(b: Tensor) -> Tensor:
    """128 bytes of nibbles, 64 of two high bits, 16 int8 scales, fp16 d; w = d*scale*(q - 32)."""
    codes = _spread(b[:, :128], 64, 4, 2).bitwise_or_(_spread(b[:, 128:192], 32, 2, 4) << 4)
    scale = b[:, 192:208].clone(memory_format=torch.contiguous_format).view(torch.int8).float()
    return _scaled(codes.float().sub_(32), scale.mul_(_half(b, 208)))


DECODERS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        "q5_0": _q5_0,
        "q5_1": _q5_1,
        "q2_k": _q2_k,
        "q3_k": _q3_k,
        "q4_k": _q4_k,
        "q5_k": _q5_k,
        "q6_k": _q6_k,
        "iq4_nl": _iq4_nl,
    }
)
"""Scheme -> (blocks, bytes) uint8 to (blocks, weights) fp32."""
