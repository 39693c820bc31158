"""DeepGEMM's form of an fp8_block128 weight: the codes as they lie in the packed rows, and one scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import FP8, GROUP
from rapid_llm.kernels.ops.gemm.fp8_block128 import codes_of, scales_of
from rapid_llm.kernels.registry import ArgumentError


@dataclass(frozen=True, slots=True, eq=False)
class BlockScaled:
    """codes: (out_features, in_features) float8_e4m3fn, rows on 16-byte boundaries. scales: (ceil(out_features / 128),
    in_features / 128) fp32, contiguous."""

    codes: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def pack(weight: Tensor, scheme: str) -> BlockScaled:
    """A view of the codes, no copy of them, and the first scale of each block; raises `ArgumentError` where the rows of
    a block differ in theirs, as rows have that were quantised one by one."""
    if scheme != FP8 or weight.dtype is not torch.uint8 or weight.dim() != 2:
        raise ArgumentError(
            f"linear: deepgemm takes weights of scheme {FP8}, (out_features, bytes) uint8: got {scheme}, "
            f"{tuple(weight.shape)} {weight.dtype}"
        )
    codes, each = codes_of(weight), scales_of(weight)
    if codes.stride(0) % 16 or codes.data_ptr() % 16:
        codes = codes.contiguous()
    scales = each[::GROUP].contiguous()
    same = each.view(torch.int32) == scales.view(torch.int32).repeat_interleave(GROUP, 0)[: each.shape[0]]
    if not bool(same.all()):
        row = int((~same).nonzero()[0, 0])
        raise ArgumentError(
            f"linear: deepgemm needs one scale for each 128 by 128 block, but row {row} of the weight has others than "
            f"row {row // GROUP * GROUP}; use native/linear.{FP8}, which takes a scale for each row"
        )
    return BlockScaled(codes, scales)
