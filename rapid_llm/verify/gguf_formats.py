"""GGUF's younger block formats in float64, weight by weight: where in its block each weight's bits lie.

A weight's code is made of fields, each some bits of one byte. For weight i of a block the tables below name the byte
and the shift; nothing else is known of a format. Source: `dequantize_row_*` in ggml's quants.c.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Parts = tuple[Tensor, Tensor, Tensor]
"""quant (rows, blocks, weights), scale and offset of the same shape or broadcast over the weights; float64."""

_SIGNED_STEPS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _field(blocks: Tensor, at: Callable[[int], int], shift: Callable[[int], int], bits: int, count: int) -> Tensor:
    """For each i < count: `bits` bits of byte at(i) of a block, from bit shift(i) on; int64."""
    places = torch.tensor([at(i) for i in range(count)], device=blocks.device)
    shifts = torch.tensor([shift(i) for i in range(count)], device=blocks.device)
    return (blocks[..., places].to(torch.int64) >> shifts) & ((1 << bits) - 1)


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).to(torch.float64)


def _signed_bytes(blocks: Tensor, start: int, count: int) -> Tensor:
    values = blocks[..., start : start + count].to(torch.int64)
    return torch.where(values > 127, values - 256, values)


def _each(groups: Tensor, size: int) -> Tensor:
    """A number for each group as one for each weight."""
    return groups.to(torch.float64).repeat_interleave(size, -1)


def _nibbles(blocks: Tensor, start: int) -> Tensor:
    return _field(blocks, lambda i: start + i % 16, lambda i: 4 * (i // 16), 4, 32)


def _five(blocks: Tensor, high: int, low: int) -> Tensor:
    return _nibbles(blocks, low) + 16 * _field(blocks, lambda i: high + i // 8, lambda i: i % 8, 1, 32)


def _twelve(blocks: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The eight scales and eight minima in the 12 bytes of q4_k and q5_k."""

    def six(first: int, shift: int) -> Tensor:
        low = _field(blocks, lambda i: start + first + i, lambda _: 0, 6, 4)
        rest = _field(blocks, lambda i: start + 8 + i, lambda _: shift, 4, 4)
        top = _field(blocks, lambda i: start + first + i, lambda _: 6, 2, 4)
        return torch.cat((low, rest + 16 * top), -1)

    return six(0, 0), six(4, 4)


def q5_0(b: Tensor) -> Parts:
    return _five(b, 2, 6) - 16, _half(b, 0), torch.zeros_like(_half(b, 0))


def q5_1(b: Tensor) -> Parts:
    return _five(b, 4, 8), _half(b, 0), _half(b, 2)


def iq4_nl(b: Tensor) -> Parts:
    steps = torch.tensor(_SIGNED_STEPS, device=b.device)
    return steps[_nibbles(b, 2)], _half(b, 0), torch.zeros_like(_half(b, 0))


def q2_k(b: Tensor) -> Parts:
    quant = _field(b, lambda i: 16 + i // 128 * 32 + i % 32, lambda i: i % 128 // 32 * 2, 2, 256)
    scale = _each(_field(b, lambda g: g, lambda _: 0, 4, 16), 16) * _half(b, 80)
    return quant, scale, -_each(_field(b, lambda g: g, lambda _: 4, 4, 16), 16) * _half(b, 82)


def q3_k(b: Tensor) -> Parts:
    low = _field(b, lambda i: 32 + i // 128 * 32 + i % 32, lambda i: i % 128 // 32 * 2, 2, 256)
    high = _field(b, lambda i: i % 32, lambda i: i // 32, 1, 256)
    scale = _field(b, lambda g: 96 + g % 8, lambda g: g // 8 * 4, 4, 16)
    scale = scale + 16 * _field(b, lambda g: 104 + g % 4, lambda g: g // 4 * 2, 2, 16) - 32
    scale = _each(scale, 16) * _half(b, 108)
    return low + 4 * high - 4, scale, torch.zeros_like(scale)


def q4_k(b: Tensor) -> Parts:
    quant = _field(b, lambda i: 16 + i // 64 * 32 + i % 32, lambda i: i % 64 // 32 * 4, 4, 256)
    scale, minimum = _twelve(b, 4)
    return quant, _each(scale, 32) * _half(b, 0), -_each(minimum, 32) * _half(b, 2)


def q5_k(b: Tensor) -> Parts:
    quant = _field(b, lambda i: 48 + i // 64 * 32 + i % 32, lambda i: i % 64 // 32 * 4, 4, 256)
    quant = quant + 16 * _field(b, lambda i: 16 + i % 32, lambda i: i // 32, 1, 256)
    scale, minimum = _twelve(b, 4)
    return quant, _each(scale, 32) * _half(b, 0), -_each(minimum, 32) * _half(b, 2)


def q6_k(b: Tensor) -> Parts:
    quant = _field(b, lambda i: i // 128 * 64 + i % 64, lambda i: i % 128 // 64 * 4, 4, 256)
    high = _field(b, lambda i: 128 + i // 128 * 32 + i % 32, lambda i: i % 128 // 32 * 2, 2, 256)
    scale = _each(_signed_bytes(b, 192, 16), 16) * _half(b, 208)
    return quant + 16 * high - 32, scale, torch.zeros_like(scale)


READERS = {
    "q5_0": q5_0,
    "q5_1": q5_1,
    "q2_k": q2_k,
    "q3_k": q3_k,
    "q4_k": q4_k,
    "q5_k": q5_k,
    "q6_k": q6_k,
    "iq4_nl": iq4_nl,
}
"""Scheme -> (rows, blocks, bytes) uint8 to its parts."""

HALVES = {
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
}
"""Where the fp16 scale of a block lies, then that of its minima; every other byte may hold anything."""

REACH = {
    "q5_0": 16.0,
    "q5_1": 31.0,
    "q2_k": 45.0,
    "q3_k": 128.0,
    "q4_k": 945.0,
    "q5_k": 1953.0,
    "q6_k": 4096.0,
    "iq4_nl": 127.0,
}
"""The largest magnitude of scale times code that the bits allow for d = 1."""

UNIT: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "q2_k": ((0, 16, 0xF0, 0x01),),
    "q3_k": ((96, 104, 0, 0x11), (104, 108, 0, 0xAA)),
    "q4_k": ((4, 8, 0, 1), (8, 12, 0x0F, 0), (12, 16, 0xF0, 0x01)),
    "q5_k": ((4, 8, 0, 1), (8, 12, 0x0F, 0), (12, 16, 0xF0, 0x01)),
    "q6_k": ((192, 208, 0, 1),),
}
"""What makes every group's scale 1, and minima small: of bytes from the first number up to the second only the bits of
the third are kept, and those of the fourth are set."""
