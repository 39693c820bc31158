"""Formats of quantised weights by the names that files give them, and as dense numbers; for loading and for tests.

Serving never goes through here: ops compute with the rows as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import FORMATS, row_elements
from rapid_llm.kernels.ops.gemm import dequantise as rows

UNQUANTIZED: Final = "unquantized"

DENSE_TYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
"""ggml types that are plain numbers."""

_BLOCK_TYPES: Final = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")

SCHEMES: Final[Mapping[str, str]] = MappingProxyType(
    {**dict.fromkeys(DENSE_TYPES, UNQUANTIZED), **{name: name.lower() for name in _BLOCK_TYPES}}
)
"""ggml type -> the `scheme` that ops know it by."""


def dequantize(data: Tensor, scheme: str) -> Tensor:
    """Quantised rows as fp32, exactly what the format means, rounded once where the exact weight is no fp32 number.

    data: (rows, bytes a row) uint8. Returns (rows, weights a row) fp32, made a bounded piece at a time. Raises
    `ValueError` for a scheme that is not a format of rows, and for rows that are not whole blocks.
    """
    if scheme not in FORMATS:
        raise ValueError(f"{scheme!r} is not a block format; known: {', '.join(FORMATS)}")
    dense = torch.empty(data.shape[0], row_elements(data.shape[1], scheme), device=data.device)
    for first, part in rows.pieces(data, scheme):
        dense[first : first + part.shape[0]] = part
    return dense
