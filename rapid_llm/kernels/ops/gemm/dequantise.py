"""Quantised weights to dense fp32 in plain PyTorch, on any device: the floor under every quantised row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import BLOCK, BLOCK_BYTES, FORMATS, FP8, row_elements
from rapid_llm.kernels.ops.gemm import fp8_block128, scaled_rows
from rapid_llm.kernels.ops.gemm.gguf_blocks import DECODERS

PIECE = 2**19
"""Weights dequantised at a time: 2 MiB of fp32, so that the five passes over a piece stay in the cache."""

CUDA_PIECE = 2**22
"""The same on a GPU, where launches cost more than passes: 16 MiB of fp32 and no more than thrice that in passing."""


def dequantise(weight: Tensor, scheme: str) -> Tensor:
    """(rows, bytes) uint8 blocks of any strides to (rows, weights) fp32, contiguous.

    Formats: `block_formats`. The product of a GGUF block's scales and codes is exact in fp32, so each of its weights is
    rounded once at most.
    """
    if scheme == FP8:
        return fp8_block128.dequantise(weight)
    if scheme in DECODERS:
        form = FORMATS[scheme]
        values = DECODERS[scheme](weight.reshape(-1, form.block))
        return values.view(weight.shape[0], weight.shape[1] // form.block * form.weights)
    if scheme not in BLOCK_BYTES:
        return scaled_rows.dequantise(weight, scheme)
    blocks = weight.reshape(-1, BLOCK_BYTES[scheme])
    if scheme == "q8_0":
        values = _codes(blocks[:, 2:], torch.int8).float().mul_(_halves(blocks, 0))
    else:
        packed = blocks[:, -(BLOCK // 2) :]
        values = torch.cat((packed & 15, packed >> 4), 1).float()
        if scheme == "q4_0":
            values.sub_(8)
        values.mul_(_halves(blocks, 0))
        if scheme == "q4_1":
            values.add_(_halves(blocks, 2))
    return values.view(weight.shape[0], weight.shape[1] // BLOCK_BYTES[scheme] * BLOCK)


def pieces(weight: Tensor, scheme: str) -> Iterator[tuple[int, Tensor]]:
    """(first row, fp32 rows) of a weight in order, up to `PIECE` weights or one row at a time: scratch is bounded."""
    features = row_elements(weight.shape[1], scheme)
    count = max(1, (CUDA_PIECE if weight.is_cuda else PIECE) // max(features, 1))
    for first in range(0, weight.shape[0], count):
        yield first, dequantise(weight[first : first + count], scheme)


def _codes(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.clone(memory_format=torch.contiguous_format).view(dtype)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The fp16 at byte `start` of each block, (blocks, 1) fp32. Copied out first: it may lie at an odd address."""
    return _codes(blocks[:, start : start + 2], torch.float16).float()
