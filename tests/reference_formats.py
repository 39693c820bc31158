"""Rows of quantised weights in plain Python, one weight after another, in the order in which ggml's C loops write them.

The second formulation of what `rapid_llm.verify.formats` knows of the younger formats; see `tests.reference`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[np.float64]]

STEPS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
BLOCKS = {"q5_0": 22, "q5_1": 24, "iq4_nl": 18, "q2_k": 84, "q3_k": 110, "q4_k": 144, "q5_k": 176, "q6_k": 210}
GROUPS = {"int4_group32": 32, "int4_group64": 64, "int4_group128": 128}


def row(data: bytes, scheme: str) -> list[float]:
    """One row's weights."""
    if scheme in BLOCKS:
        read = {"q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q45_k, "q5_k": _q45_k, "q6_k": _q6_k}.get(scheme, _small)
        return [w for at in range(0, len(data), BLOCKS[scheme]) for w in read(data[at : at + BLOCKS[scheme]])]
    if scheme in GROUPS:
        return _int4(data, GROUPS[scheme])
    columns = len(data) - 16
    (scale,) = struct.unpack_from("<f", data, columns)
    if scheme == "int8_channel":
        return [scale * code for code in struct.unpack_from(f"<{columns}b", data)]
    return [scale * e4m3(code) for code in data[:columns]]


def e4m3(code: int) -> float:
    exponent, fraction = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    size = math.ldexp(8 + fraction, exponent - 10) if exponent else math.ldexp(fraction, -9)
    return -size if code >> 7 else size


def _half(data: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", data, at)[0])


def _small(b: bytes) -> list[float]:
    """Blocks of 32, told apart by their size."""
    codes = b[-16:]
    codes = [c & 15 for c in codes] + [c >> 4 for c in codes]
    if len(b) == 18:
        return [_half(b, 0) * STEPS[c] for c in codes]
    (high,) = struct.unpack_from("<I", b, len(b) - 20)
    codes = [c | (high >> i & 1) << 4 for i, c in enumerate(codes)]
    if len(b) == 22:
        return [_half(b, 0) * (c - 16) for c in codes]
    return [_half(b, 0) * c + _half(b, 2) for c in codes]


def _q2_k(b: bytes) -> Iterator[float]:
    d, dmin, scales = _half(b, 80), _half(b, 82), iter(b[:16])
    for q in (16, 48):
        for shift in (0, 2, 4, 6):
            for part in (0, 16):
                scale = next(scales)
                for i in range(16):
                    yield d * (scale & 15) * (b[q + part + i] >> shift & 3) - dmin * (scale >> 4)


def _q3_k(b: bytes) -> Iterator[float]:
    low, mid, high = (int.from_bytes(b[at : at + 4], "little") for at in (96, 100, 104))
    two, four = 0x03030303, 0x0F0F0F0F
    words = (
        low & four | (high & two) << 4,
        mid & four | (high >> 2 & two) << 4,
        low >> 4 & four | (high >> 4 & two) << 4,
        mid >> 4 & four | (high >> 6 & two) << 4,
    )
    scales = iter(b"".join(word.to_bytes(4, "little") for word in words))
    bit = 1
    for q in (32, 64):
        for shift in (0, 2, 4, 6):
            for part in (0, 16):
                scale = _half(b, 108) * (next(scales) - 32)
                for i in range(part, part + 16):
                    yield scale * ((b[q + i] >> shift & 3) - (0 if b[i] & bit else 4))
            bit <<= 1


def _q45_k(b: bytes) -> Iterator[float]:
    s, wide = b[4:16], len(b) == 176
    for j in range(8):
        if j < 4:
            scale, least = s[j] & 63, s[j + 4] & 63
        else:
            scale = s[j + 4] & 15 | s[j - 4] >> 6 << 4
            least = s[j + 4] >> 4 | s[j] >> 6 << 4
        for i in range(32):
            code = b[(48 if wide else 16) + j // 2 * 32 + i] >> j % 2 * 4 & 15
            if wide and b[16 + i] >> j & 1:
                code += 16
            yield _half(b, 0) * scale * code - _half(b, 2) * least


def _q6_k(b: bytes) -> list[float]:
    result = [0.0] * 256
    scales = struct.unpack_from("<16b", b, 192)
    for half in (0, 1):
        low, high, scale, out = b[64 * half :], b[128 + 32 * half :], scales[8 * half :], 128 * half
        for i in range(32):
            codes = (
                low[i] & 15 | (high[i] & 3) << 4,
                low[i + 32] & 15 | (high[i] >> 2 & 3) << 4,
                low[i] >> 4 | (high[i] >> 4 & 3) << 4,
                low[i + 32] >> 4 | (high[i] >> 6 & 3) << 4,
            )
            for quarter, code in enumerate(codes):
                result[out + 32 * quarter + i] = _half(b, 208) * scale[i // 16 + 2 * quarter] * (code - 32)
    return result


def _int4(data: bytes, group: int) -> list[float]:
    """Two codes a byte, then (scale, zero point) pairs of as many groups as fill the row up to its padding."""
    groups = len(data) // (group // 2 + 4)
    pairs = list(struct.iter_unpack("<ee", data[groups * group // 2 :][: 4 * groups]))
    codes = [code for byte in data[: groups * group // 2] for code in (byte & 15, byte >> 4)]
    return [pairs[i // group][0] * (code - pairs[i // group][1]) for i, code in enumerate(codes)]


def held(key: Array, value: Array, cache: torch.Tensor, *, exact_key: bool) -> tuple[Array, Array]:
    """Keys and values as `cache` holds them. exact_key: for e4m3 a key is cut to its range and not rounded."""
    if cache.dtype != torch.float8_e4m3fn:
        return key, value
    return np.clip(key, -448, 448) if exact_key else _nearest(key), _nearest(value)


def _nearest(values: Array) -> Array:
    """The nearest numbers of e4m3, by comparison with the midpoints; of two, the even code's."""
    numbers = np.array([e4m3(code) for code in range(127)])
    middle = (numbers[1:] + numbers[:-1]) / 2
    size = np.abs(values)
    below, above = np.searchsorted(middle, size, side="left"), np.searchsorted(middle, size, side="right")
    code = np.where(below % 2 == 0, below, above)
    return np.where(np.isnan(values), values, np.copysign(numbers[code], values))
