"""Weights of every younger format in plain fp32, group after group, each of which can be told to make a fault.

Part of `plain`: right without `fault`, and of no kin to the oracles or the rows that ship.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import FORMATS, FP8_CHANNEL, INT4_GROUPS, INT8_CHANNEL, row_elements

_STEPS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantise(data: Tensor, scheme: str, fault: str = "") -> Tensor:
    """(rows, bytes) uint8 -> (rows, weights) fp32."""
    if scheme in (FP8_CHANNEL, INT8_CHANNEL):
        return _channel(data, scheme, fault)
    if scheme in INT4_GROUPS:
        return _groups(data, scheme, fault)
    blocks = data.reshape(-1, FORMATS[scheme].block).to(torch.int32)
    read = {"q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q4_k, "q6_k": _q6_k}.get(scheme, _small)
    parts = read(blocks, scheme, fault)
    return torch.cat(parts, 1).reshape(data.shape[0], row_elements(data.shape[1], scheme))


def _half(blocks: Tensor, at: int) -> Tensor:
    return (blocks[:, at : at + 1] + 256 * blocks[:, at + 1 : at + 2]).to(torch.int16).view(torch.float16).float()


def _small(b: Tensor, scheme: str, fault: str) -> list[Tensor]:
    d, low = _half(b, 0), b[:, -16:]
    low, high = low & 15, low >> 4
    if scheme == "iq4_nl":
        steps = torch.tensor(_STEPS)
        return [d * steps[low], d * steps[high]]
    start = 2 if scheme == "q5_0" else 4
    bits = torch.cat([b[:, start + n : start + n + 1] >> torch.arange(8) & 1 for n in range(4)], 1)
    if fault != "high bits ignored":
        low, high = low + 16 * bits[:, :16], high + 16 * bits[:, 16:]
    if scheme == "q5_0":
        return [d * (low - 16), d * (high - 16)]
    return [d * low + _half(b, 2), d * high + _half(b, 2)]


def _q2_k(b: Tensor, scheme: str, fault: str) -> list[Tensor]:
    d, dmin, parts = _half(b, 80), _half(b, 82), []
    for g in range(16):
        start, shift = 16 + g // 8 * 32 + g % 2 * 16, g % 8 // 2 * 2
        scale, minimum = d * (b[:, g : g + 1] & 15), dmin * (b[:, g : g + 1] >> 4)
        code = b[:, start : start + 16] >> shift & 3
        parts.append(scale * code - (0 if fault == "offset ignored" else minimum))
    return parts


def _q3_k(b: Tensor, scheme: str, fault: str) -> list[Tensor]:
    parts = []
    for g in range(16):
        start, shift = g // 8 * 32 + g % 2 * 16, g % 8 // 2 * 2
        scale = b[:, 96 + g % 8] >> (4 if g > 7 else 0) & 15
        scale = scale | (b[:, 104 + g % 4] >> (2 * (g // 4)) & 3) << 4
        high = b[:, g % 2 * 16 : g % 2 * 16 + 16] >> (g // 2) & 1
        if fault == "high bits inverted":
            high = 1 - high
        code = (b[:, 32 + start : 48 + start] >> shift & 3) - 4 * (1 - high)
        parts.append(_half(b, 108) * (scale[:, None] - 32) * code)
    return parts


def _q4_k(b: Tensor, scheme: str, fault: str) -> list[Tensor]:
    """q5_k too."""
    d, dmin, s, parts = _half(b, 0), _half(b, 2), b[:, 4:16], []
    for g in range(8):
        if g < 4:
            scale, minimum = s[:, g] & 63, s[:, g + 4] & 63
        else:
            scale = s[:, g + 4] & 15 | s[:, g - 4] >> 6 << 4
            minimum = s[:, g + 4] >> 4 | s[:, g] >> 6 << 4
            if fault == "top bits of scales ignored":
                scale = scale & 15
        start = (16 if scheme == "q4_k" else 48) + g // 2 * 32
        code = b[:, start : start + 32] >> (4 * (g % 2)) & 15
        if scheme == "q5_k" and fault != "high bits ignored":
            code = code + 16 * (b[:, 16:48] >> g & 1)
        parts.append(d * scale[:, None] * code - (0 if fault == "offset ignored" else dmin * minimum[:, None]))
    return parts


def _q6_k(b: Tensor, scheme: str, fault: str) -> list[Tensor]:
    parts = []
    for g in range(16):
        half, place = g // 8, g % 8
        low, high = half * 64 + place % 4 * 16, 128 + half * 32 + place % 2 * 16
        code = b[:, low : low + 16] >> (4 * (place // 4)) & 15
        code = code + 16 * (b[:, high : high + 16] >> (place // 2 * 2) & 3)
        scale = b[:, 192 + g : 193 + g]
        if fault != "scales unsigned":
            scale = torch.where(scale > 127, scale - 256, scale)
        parts.append(_half(b, 208) * scale * (code - 32))
    return parts


def _channel(data: Tensor, scheme: str, fault: str) -> Tensor:
    columns = row_elements(data.shape[1], scheme)
    kind = torch.float8_e4m3fn if scheme == FP8_CHANNEL else torch.int8
    if fault == "e5m2":
        kind = torch.float8_e5m2
    codes = data[:, :columns].clone(memory_format=torch.contiguous_format)
    scale = data[:, columns : columns + 4].clone(memory_format=torch.contiguous_format).view(torch.float32)
    if fault == "first scale alone":
        scale = scale[:1]
    return (codes.float() if fault == "codes unsigned" else codes.view(kind).float()) * scale


def _groups(data: Tensor, scheme: str, fault: str) -> Tensor:
    size, columns = INT4_GROUPS[scheme], row_elements(data.shape[1], scheme)
    raw = data[:, columns // 2 : columns // 2 + 4 * (columns // size)]
    numbers = raw.clone(memory_format=torch.contiguous_format).view(torch.float16).float()
    parts = []
    for g in range(columns // size):
        packed = data[:, g * size // 2 : (g + 1) * size // 2].to(torch.int32)
        pair = (packed >> 4, packed & 15) if fault == "high nibble first" else (packed & 15, packed >> 4)
        code = torch.stack(pair, 2).flatten(1).float()
        at = 0 if fault == "first scale alone" else g
        zero = 8.0 if fault == "zero point fixed" else numbers[:, 2 * g + 1 : 2 * g + 2]
        parts.append((code - zero) * numbers[:, 2 * at : 2 * at + 1])
    return torch.cat(parts, 1) if parts else torch.zeros(data.shape[0], 0)


_MISREAD: Final = (
    *(("high bits ignored", scheme) for scheme in ("q5_0", "q5_1", "q5_k")),
    *(("offset ignored", scheme) for scheme in ("q2_k", "q4_k")),
    *(("top bits of scales ignored", scheme) for scheme in ("q4_k", "q5_k")),
    *(("high bits inverted", "q3_k"), ("scales unsigned", "q6_k"), ("e5m2", "fp8_channel")),
    *(("codes unsigned", "int8_channel"), ("first scale alone", "int8_channel")),
    *(("high nibble first", "int4_group32"), ("first scale alone", "int4_group64")),
    ("zero point fixed", "int4_group128"),
)

_ROUNDED: Final = tuple(("weight through bf16", scheme) for scheme in ("q4_k", "q6_k", "int8_channel", "int4_group64"))

FAULTS: Final = {
    op: tuple((fault, dtype, scheme) for fault, scheme in faults)
    for op, dtype, faults in (("linear", "fp32", (*_MISREAD, *_ROUNDED)), ("embedding", "uint8", _MISREAD))
}
"""Op -> faults, each with the dtype and the scheme whose cases must show it."""
