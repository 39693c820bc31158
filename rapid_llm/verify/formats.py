"""Formats of quantised weights in float64: dequantisation for the oracles, and random weights for the cases."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import (
    BLOCK,
    BLOCK_BYTES,
    FORMATS,
    FP8,
    FP8_CHANNEL,
    GROUP,
    INT4_GROUPS,
    INT8_CHANNEL,
    row_bytes,
    row_elements,
)
from rapid_llm.verify import gguf_formats


class Blocks(NamedTuple):
    """A quantised matrix taken apart, in float64: w = scale * quant + offset.

    quant: (rows, blocks, weights of a block), what the codes stand for: 8 is taken off those of q4_0, e4m3 is read, but
    zero points of int4 are part of the offset. scale, offset: a number for each block, (rows, blocks, 1), or for each
    weight where a block has groups of its own.
    """

    quant: Tensor
    scale: Tensor
    offset: Tensor

    def values(self) -> Tensor:
        """The exact weights, (rows, weights)."""
        return (self.quant * self.scale + self.offset).flatten(1)


def unpack(data: Tensor, scheme: str) -> Blocks:
    """Take (rows, bytes) uint8 blocks apart; raises `ValueError` for another scheme or a broken last block."""
    if scheme not in FORMATS:
        raise ValueError(f"scheme {scheme!r} is no block format; known: {', '.join(FORMATS)}")
    if scheme in gguf_formats.READERS:
        whole = data.contiguous().reshape(data.shape[0], data.shape[1] // FORMATS[scheme].block, FORMATS[scheme].block)
        quant, scale, offset = gguf_formats.READERS[scheme](whole)
        return Blocks(quant.to(torch.float64), scale, offset)
    if scheme in (FP8, FP8_CHANNEL):
        return _unpack_fp8(data, scheme)
    if scheme not in BLOCK_BYTES:
        return _unpack_integers(data, scheme)
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


def _unpack_fp8(data: Tensor, scheme: str) -> Blocks:
    """e4m3 by its definition: sign, four bits of exponent with bias 7, three of fraction; all ones but the sign is
    NaN."""
    rows, columns = data.shape[0], row_elements(data.shape[1], scheme)
    groups = columns // GROUP if scheme == FP8 else 1
    codes = data[:, :columns].to(torch.int64).reshape(rows, groups, columns // max(groups, 1))
    exponent, fraction = codes >> 3 & 15, (codes & 7).to(torch.float64)
    normal = (8 + fraction) * torch.exp2((exponent - 10).to(torch.float64))
    value = torch.where(exponent > 0, normal, fraction * 2.0**-9)
    value = torch.where(codes & 127 == 127, float("nan"), value)
    scale = _floats(data, columns, groups, torch.float32)[..., None]
    return Blocks(torch.where(codes >= 128, -value, value), scale, torch.zeros_like(scale))


def _unpack_integers(data: Tensor, scheme: str) -> Blocks:
    """int8 codes and one scale; or nibbles, low ones first, and a scale and a zero point for each group of them."""
    rows, columns = data.shape[0], row_elements(data.shape[1], scheme)
    if scheme == INT8_CHANNEL:
        codes = data[:, :columns].to(torch.int64)
        signed = torch.where(codes > 127, codes - 256, codes).to(torch.float64)
        scale = _floats(data, columns, 1, torch.float32)[..., None]
        return Blocks(signed[:, None, :], scale, torch.zeros_like(scale))
    index = torch.arange(columns, device=data.device)
    codes = data[:, index // 2].to(torch.int64) >> (index % 2 * 4) & 15
    groups = columns // INT4_GROUPS[scheme]
    pairs = _floats(data, columns // 2, 2 * groups, torch.float16).reshape(rows, groups, 2)
    scale, zero = pairs[..., :1], pairs[..., 1:]
    return Blocks(codes.to(torch.float64).reshape(rows, groups, INT4_GROUPS[scheme]), scale, -zero * scale)


def _floats(data: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` little-endian numbers from byte `start` of each row on, in float64."""
    raw = data[:, start : start + count * dtype.itemsize].clone(memory_format=torch.contiguous_format)
    return raw.view(dtype).to(torch.float64)


def dequantise(data: Tensor, scheme: str) -> Tensor:
    """The exact weights of (rows, bytes) uint8 blocks: (rows, weights) float64."""
    return unpack(data, scheme).values()


def random_blocks(
    generator: torch.Generator, rows: int, elements: int, scheme: str, *, exact: bool = False, spread: float = 1.0
) -> Tensor:
    """(rows, bytes) uint8 blocks with random codes and weights of about `spread` in size.

    exact: scales are 1 and offsets small integers, so that sums over integer inputs have no rounding error at all.
    """
    if elements % FORMATS[scheme].weights:
        raise ValueError(f"{scheme}: {elements} weights do not fill blocks of {FORMATS[scheme].weights}")
    if scheme in (FP8, FP8_CHANNEL):
        return _random_fp8(generator, rows, elements, scheme, exact=exact, spread=spread)
    if scheme not in BLOCK_BYTES and scheme not in gguf_formats.READERS:
        return _random_integers(generator, rows, elements, scheme, exact=exact, spread=spread)
    size = FORMATS[scheme].block
    blocks = elements // FORMATS[scheme].weights
    data = torch.randint(0, 256, (rows, blocks, size), generator=generator, dtype=torch.uint8)
    reach = _REACH[scheme]
    if exact:
        scale = torch.ones(rows, blocks, 1)
        offset = torch.randint(-8, 9, (rows, blocks, 1), generator=generator).to(torch.float32)
        for start, stop, keep, put in gguf_formats.UNIT.get(scheme, ()):
            data[..., start:stop] = data[..., start:stop] & keep | put
    else:
        scale = _scales(generator, (rows, blocks, 1), spread / reach)
        offset = torch.randn(rows, blocks, 1, generator=generator) * (spread / (64 if size > 64 else 1))
    for at, values in zip(_HALVES[scheme], (scale, offset), strict=False):
        data[..., at : at + 2] = values.to(torch.float16).view(torch.uint8)
    return data.reshape(rows, blocks * size)


_REACH = {"q8_0": 127.0, "q4_0": 8.0, "q4_1": 8.0, **gguf_formats.REACH}
_HALVES: dict[str, tuple[int, ...]] = {"q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), **gguf_formats.HALVES}


def _scales(g: torch.Generator, shape: tuple[int, ...], size: float) -> Tensor:
    """Scales of both signs, a quarter to five quarters of `size`."""
    sign = torch.randint(0, 2, shape, generator=g) * 2.0 - 1.0
    return (torch.rand(shape, generator=g) + 0.25) * sign * size


def _random_fp8(
    generator: torch.Generator, rows: int, elements: int, scheme: str, *, exact: bool, spread: float
) -> Tensor:
    """Codes of every kind but NaN, of which small ones are as likely as large ones; one scale for each 128 rows, or
    for each row."""
    data = torch.zeros(rows, row_bytes(elements, scheme), dtype=torch.uint8)
    shape = (-(-rows // GROUP), elements // GROUP) if scheme == FP8 else (rows, 1)
    if exact:
        values = torch.randint(-8, 9, (rows, elements), generator=generator).to(torch.float32)
        codes, scale = values.to(torch.float8_e4m3fn).view(torch.uint8), torch.ones(shape)
    else:
        codes = torch.randint(0, 127, (rows, elements), generator=generator, dtype=torch.uint8)
        codes |= torch.randint(0, 2, codes.shape, generator=generator, dtype=torch.uint8) << 7
        scale = _scales(generator, shape, spread / 64.0)
    data[:, :elements] = codes
    each = scale.repeat_interleave(GROUP if scheme == FP8 else 1, 0)[:rows].contiguous()
    data[:, elements : elements + 4 * shape[1]] = each.view(torch.uint8)
    return data


def _random_integers(
    generator: torch.Generator, rows: int, elements: int, scheme: str, *, exact: bool, spread: float
) -> Tensor:
    """Codes of every value; zero points are integers, but some that are not."""
    data = torch.zeros(rows, row_bytes(elements, scheme), dtype=torch.uint8)
    if scheme == INT8_CHANNEL:
        codes = torch.randint(-8 if exact else -128, 8 if exact else 128, (rows, elements), generator=generator)
        data[:, :elements] = codes.to(torch.int8).view(torch.uint8)
        scale = torch.ones(rows, 1) if exact else _scales(generator, (rows, 1), spread / 128)
        data[:, elements : elements + 4] = scale.view(torch.uint8)
        return data
    half, groups = elements // 2, elements // INT4_GROUPS[scheme]
    data[:, :half] = torch.randint(0, 256, (rows, half), generator=generator, dtype=torch.uint8)
    scale = torch.ones(rows, groups) if exact else _scales(generator, (rows, groups), spread / 8)
    zero = torch.randint(0, 17, (rows, groups), generator=generator).to(torch.float32)
    if not exact:
        zero = zero + torch.rand(rows, groups, generator=generator) * (torch.arange(groups) % 3 == 2)
    pairs = torch.stack((scale, zero), 2).flatten(1).to(torch.float16)
    data[:, half : half + 4 * groups] = pairs.view(torch.uint8)
    return data
