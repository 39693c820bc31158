"""GGUF's block formats as dense numbers, by the formulas in `kernels.ops.block_formats`; for loading and for tests.

Serving never goes through here: ops compute with the blocks themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import BLOCK, BLOCK_BYTES, row_elements

UNQUANTIZED: Final = "unquantized"

DENSE_TYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
"""ggml types that are plain numbers."""

SCHEMES: Final[Mapping[str, str]] = MappingProxyType(
    {**dict.fromkeys(DENSE_TYPES, UNQUANTIZED), "Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1"}
)
"""ggml type -> the `scheme` that ops know it by."""


def dequantize(data: Tensor, scheme: str) -> Tensor:
    """Blocks as fp32, exactly what the format means (d * q is exact in fp32; adding q4_1's minimum rounds once).

    data: (rows, bytes a row) uint8. Returns (rows, weights a row) fp32. Raises `ValueError` for a scheme that is not a
    block format, and for rows that are not whole blocks.
    """
    if scheme not in BLOCK_BYTES:
        raise ValueError(f"{scheme!r} is not a block format; known: {', '.join(BLOCK_BYTES)}")
    rows, nbytes = data.shape
    elements = row_elements(nbytes, scheme)
    blocks = data.view(rows, elements // BLOCK, BLOCK_BYTES[scheme])
    scale = _half(blocks, 0)
    if scheme == "q8_0":
        return (blocks[..., 2:].contiguous().view(torch.int8) * scale).view(rows, elements)
    packed = blocks[..., -BLOCK // 2 :]
    nibbles = torch.cat((packed & 15, packed >> 4), dim=-1).float()
    values = (nibbles - 8) * scale if scheme == "q4_0" else nibbles * scale + _half(blocks, 2)
    return values.view(rows, elements)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 at byte `at` of every block, as fp32 of shape (rows, blocks, 1)."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()
