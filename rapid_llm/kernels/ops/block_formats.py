"""GGUF block formats in numbers: 32 weights a block. Torch-free, shared by ops, oracles and the loader."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

BLOCK: Final = 32
"""Weights per block in every format below."""

BLOCK_BYTES: Final = MappingProxyType({"q8_0": 34, "q4_0": 18, "q4_1": 20})
"""Bytes per block. q8_0: fp16 d, 32 int8 q; w = d*q. q4_0: fp16 d, 16 bytes; w = d*(q - 8). q4_1: fp16 d, fp16 m,
16 bytes; w = d*q + m. The low nibble of byte i is weight i, the high nibble weight i + 16."""


def row_bytes(elements: int, scheme: str) -> int:
    """Bytes of one row of `elements` weights; raises `ValueError` where they do not fill whole blocks."""
    if elements % BLOCK:
        raise ValueError(f"{scheme}: a row of {elements} weights does not divide into blocks of {BLOCK}")
    return elements // BLOCK * BLOCK_BYTES[scheme]


def row_elements(bytes_per_row: int, scheme: str) -> int:
    """Weights in one row of `bytes_per_row` bytes; raises `ValueError` on a broken last block."""
    if bytes_per_row % BLOCK_BYTES[scheme]:
        raise ValueError(
            f"{scheme}: a row of {bytes_per_row} bytes does not divide into {BLOCK_BYTES[scheme]}-byte blocks"
        )
    return bytes_per_row // BLOCK_BYTES[scheme] * BLOCK
