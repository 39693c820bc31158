"""Formats of quantised weights in numbers. Torch-free, shared by ops, oracles and the loader.

GGUF's have blocks of 32 weights, each with its scale beside it. `fp8_block128` has the e4m3 codes of a row, then one
fp32 scale for each 128 of them: a row is whole by itself, so that weights can be cut, sharded and fused by rows.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

BLOCK: Final = 32
"""Weights per block in every format of `BLOCK_BYTES`."""

BLOCK_BYTES: Final = MappingProxyType({"q8_0": 34, "q4_0": 18, "q4_1": 20})
"""Bytes per block. q8_0: fp16 d, 32 int8 q; w = d*q. q4_0: fp16 d, 16 bytes; w = d*(q - 8). q4_1: fp16 d, fp16 m,
16 bytes; w = d*q + m. The low nibble of byte i is weight i, the high nibble weight i + 16."""

FP8: Final = "fp8_block128"
"""w = d*q, q in fp8 e4m3. The rows of a 128 by 128 block of the matrix hold the same d."""

GROUP: Final = 128
"""Weights that share a scale in `FP8`."""

_ALIGN: Final = 16
"""Rows of `FP8` are padded with zeros to a multiple of so many bytes, as bulk copies of GPUs want their strides."""

_FOUR: Final = 4 * GROUP + _ALIGN
"""Bytes of four groups: their scales fill the padding exactly."""


def row_bytes(elements: int, scheme: str) -> int:
    """Bytes of one row of `elements` weights; raises `ValueError` where they do not fill whole blocks."""
    block = GROUP if scheme == FP8 else BLOCK
    if elements % block:
        raise ValueError(f"{scheme}: a row of {elements} weights does not divide into blocks of {block}")
    if scheme == FP8:
        return elements + -(-elements // (4 * GROUP)) * _ALIGN
    return elements // BLOCK * BLOCK_BYTES[scheme]


def row_elements(bytes_per_row: int, scheme: str) -> int:
    """Weights in one row of `bytes_per_row` bytes; raises `ValueError` on a broken last block."""
    if scheme == FP8:
        fours, rest = divmod(bytes_per_row, _FOUR)
        elements = fours * 4 * GROUP + max(rest - _ALIGN, 0)
        if row_bytes(elements // GROUP * GROUP, FP8) != bytes_per_row:
            raise ValueError(f"{scheme}: a row of {bytes_per_row} bytes is not {GROUP} codes a group and their scales")
        return elements
    if bytes_per_row % BLOCK_BYTES[scheme]:
        raise ValueError(
            f"{scheme}: a row of {bytes_per_row} bytes does not divide into {BLOCK_BYTES[scheme]}-byte blocks"
        )
    return bytes_per_row // BLOCK_BYTES[scheme] * BLOCK
