"""Formats of quantised weights in numbers. Torch-free, shared by ops, oracles and the loader.

A weight of any scheme is one matrix of bytes, a row for each row of weights, and a row is whole by itself: weights can
be cut, sharded and fused by rows. GGUF's blocks lie one after another, each with its scales; in the other formats all
codes of a row come first and its scales follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

BLOCK: Final = 32
"""Weights per block in every format of `BLOCK_BYTES`."""

BLOCK_BYTES: Final = MappingProxyType({"q8_0": 34, "q4_0": 18, "q4_1": 20})
"""Bytes per block. q8_0: fp16 d, 32 int8 q; w = d*q. q4_0: fp16 d, 16 bytes; w = d*(q - 8). q4_1: fp16 d, fp16 m,
16 bytes; w = d*q + m. The low nibble of byte i is weight i, the high nibble weight i + 16."""

SUPER: Final = 256
"""Weights per block in GGUF's formats whose names end in k: 8 or 16 groups with scales of their own."""

FP8: Final = "fp8_block128"
"""w = d*q, q in fp8 e4m3. The rows of a 128 by 128 block of the matrix hold the same d."""

GROUP: Final = 128
"""Weights that share a scale in `FP8`."""

FP8_CHANNEL: Final = "fp8_channel"
INT8_CHANNEL: Final = "int8_channel"
INT4_GROUPS: Final = MappingProxyType({f"int4_group{size}": size for size in (32, 64, 128)})
"""Scheme -> weights that share a scale and a zero point."""

_ALIGN: Final = 16
"""Rows that are not GGUF's are padded with zeros to a multiple of so many bytes, as bulk copies of GPUs want their
strides."""


class Format(NamedTuple):
    """A row: for each block of `weights` weights `block` bytes, then `tail` bytes, then zeros up to `align`."""

    weights: int
    block: int
    tail: int = 0
    align: int = 1


FORMATS: Final[Mapping[str, Format]] = MappingProxyType(
    {
        **{scheme: Format(BLOCK, size) for scheme, size in BLOCK_BYTES.items()},
        "q5_0": Format(BLOCK, 22),
        "q5_1": Format(BLOCK, 24),
        "q2_k": Format(SUPER, 84),
        "q3_k": Format(SUPER, 110),
        "q4_k": Format(SUPER, 144),
        "q5_k": Format(SUPER, 176),
        "q6_k": Format(SUPER, 210),
        "iq4_nl": Format(BLOCK, 18),
        FP8: Format(GROUP, GROUP + 4, align=_ALIGN),
        FP8_CHANNEL: Format(_ALIGN, _ALIGN, tail=4, align=_ALIGN),
        INT8_CHANNEL: Format(_ALIGN, _ALIGN, tail=4, align=_ALIGN),
        **{scheme: Format(size, size // 2 + 4, align=_ALIGN) for scheme, size in INT4_GROUPS.items()},
    }
)
"""Every scheme but 'unquantized'. What the bytes mean: GGUF's in `ops.gemm.gguf_blocks`, the others' in
`ops.gemm.fp8_block128` and `ops.gemm.scaled_rows`."""

DECODED: Final = tuple(scheme for scheme in FORMATS if scheme not in BLOCK_BYTES and scheme != FP8)
"""Schemes that `BLOCK_BYTES` does not have, nor kernels that were written for `FP8` alone."""


def row_bytes(elements: int, scheme: str) -> int:
    """Bytes of one row of `elements` weights; raises `ValueError` where they do not fill whole blocks."""
    form = FORMATS[scheme]
    if elements % form.weights:
        raise ValueError(f"{scheme}: a row of {elements} weights does not divide into blocks of {form.weights}")
    return -(-(elements // form.weights * form.block + form.tail) // form.align) * form.align


def row_elements(bytes_per_row: int, scheme: str) -> int:
    """Weights in one row of `bytes_per_row` bytes; raises `ValueError` where no row has so many."""
    form = FORMATS[scheme]
    elements = max(bytes_per_row - form.tail, 0) // form.block * form.weights
    if row_bytes(elements, scheme) != bytes_per_row:
        raise ValueError(
            f"{scheme}: a row of {bytes_per_row} bytes does not divide into {form.block}-byte blocks"
            + (f", and what belongs to them, of {form.weights} weights" if form.align > 1 else "")
        )
    return elements
