"""fp8 e4m3 (OCP, without infinities): how caches of keys and values may hold them.

A store rounds to nearest, ties to even, and gives the largest number, 448, for everything beyond it; NaN stays NaN.
Triton's part works on the bits, for no GPU before SM 89 converts to e4m3 itself.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.triton_support import INTERPRETED, tl, triton

E4M3: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0

_PINNED = tl.constexpr(not INTERPRETED)  # its interpreter knows no assembly, and no threads


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` as a cache of `dtype` holds them: themselves, or rounded to e4m3."""
    return values.float().clamp(-LARGEST, LARGEST).to(E4M3) if dtype is E4M3 else values


def as_bytes(cache: Tensor) -> Tensor:
    """A cache as Triton's kernels take it: one of e4m3 as bytes."""
    return cache.view(torch.uint8) if cache.dtype is E4M3 else cache


@triton.jit
def decode_e4m3(code):
    """Bytes as fp32. The seven low bits, moved to where fp32 keeps exponent and fraction, make a number that is too
    small by the biases' difference, 2**120, subnormals included."""
    wide = code.to(tl.int32)
    bits = ((wide & 128) << 24) | ((wide & 127) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    return tl.where((wide & 127) == 127, float("nan"), value)


@triton.jit
def settled(values):
    """`values` of 16 bits, decoded by the threads that loaded them.

    Below SM 90 Triton would else move the decoding behind the exchange between threads, where every warp decodes the
    whole tile: eight times the work, and minutes to compile. It moves nothing past assembly that is not pure.
    """
    if _PINNED:
        values = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=2
        )
    return values


@triton.jit
def encode_e4m3(x):
    """fp32 as bytes, rounded to nearest even, saturating."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 128
    size = tl.minimum(tl.abs(x), 448.0)
    whole = size.to(tl.int32, bitcast=True)
    # Of a normal number 20 bits go: half of their unit is added, less one where what stays is even. 960: the biases
    # of both exponents, 127 and 7, apart.
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - 960
    # fp32 numbers from 2**14 on are as far apart as e4m3's subnormals: the sum rounds, and its low bits are the code.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    return (tl.where(x == x, code, 127) | sign).to(tl.uint8)
