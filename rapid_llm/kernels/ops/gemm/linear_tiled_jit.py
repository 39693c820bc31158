"""`jit/linear.<scheme>`: up to 8 rows of input times tiled GGUF blocks, by one call of a CUDA launcher.

See csrc/gemm/linear_tiled.cu. `pack` holds as many bits a weight as the blocks do, in another order: a record is 8
outputs times one group of blocks, for each lane of a warp 16 bytes of codes, then scales. Outputs and groups are filled
up with zeros.
A row of the result has the same bits however many rows the input has. Codes are exact in the input's dtype, scales are
applied to fp32 sums of a block: an input beyond 2**121 may overflow there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from rapid_llm.kernels.jit import Kernel
from rapid_llm.kernels.ops.block_formats import BLOCK_BYTES
from rapid_llm.kernels.registry import ArgumentError

ROWS: Final = 8
"""Outputs in a record."""

LANES: Final = 4
"""Threads of a warp that share a block; each takes 8 features of it."""

_FORMATS: Final = {"q8_0": 0, "q4_0": 1, "q4_1": 2}
_BYTES: Final = (0, 2, 1, 3, 4, 6, 5, 7)
"""Order of 8 codes of a byte each: a word's bytes 0 and 2 are neighbours, and 1 and 3."""

_linear: Final = Kernel("linear_tiled", "gemm/linear_tiled.cu")
prepare: Final = _linear.prepare


@dataclass(frozen=True, slots=True, eq=False)
class TiledWeight:
    """records: (ceil(outputs / 8), groups, bytes) uint8."""

    records: Tensor
    outputs: int

    @property
    def nbytes(self) -> int:
        return self.records.nbytes


def pack(weight: Tensor, scheme: str) -> TiledWeight:
    """Holds the weight's blocks as records, which must not be written while a call may read them."""
    outputs, size = weight.shape[0], BLOCK_BYTES[scheme]
    group = 2 if scheme == "q8_0" else 4
    blocks = weight.reshape(outputs, weight.shape[1] // size, size)
    blocks = F.pad(blocks, (0, 0, 0, -blocks.shape[1] % group, 0, -outputs % ROWS))
    tiles, groups = blocks.shape[0] // ROWS, blocks.shape[1] // group
    heads = 4 if scheme == "q4_1" else 2
    codes = _codes(blocks[..., heads:], scheme).view(tiles, ROWS, groups, group, LANES, 16 // group)
    codes = codes.permute(0, 2, 1, 4, 3, 5).flatten(2)
    # Of each thread: for d and then m, for each block, the scales of its two outputs.
    scales = blocks[..., :heads].reshape(tiles, LANES, 2, groups, group, heads // 2, 2)
    scales = scales.permute(0, 3, 1, 5, 4, 2, 6).flatten(2)
    records = torch.cat((codes, scales), 2)
    if records.is_cuda:
        torch.cuda.synchronize(records.device)  # the kernel may read them before the one that wrote them has ended
    return TiledWeight(records, outputs)


def _codes(stored: Tensor, scheme: str) -> Tensor:
    """(outputs, blocks, bytes) as GGUF has them, to as many bytes in the order of the kernel: by lane, then feature."""
    if scheme == "q8_0":
        return stored.unflatten(2, (LANES, 8))[..., list(_BYTES)].contiguous()
    nibbles = torch.cat((stored & 15, stored >> 4), 2).unflatten(2, (LANES, 4, 2))  # in the order of the features
    low, high = nibbles[..., 0], nibbles[..., 1]  # features 0 2 4 6 and 1 3 5 7 of a lane's 8
    even = torch.stack((low[..., 0::2], high[..., 0::2]), 3)
    odd = torch.stack((low[..., 1::2], high[..., 1::2]), 3)
    return (even.flatten(3) | odd.flatten(3) << 4).contiguous()


def linear(
    input: Tensor,
    weight: TiledWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    scheme: str = "unquantized",
) -> Tensor:
    """input @ weight.T + bias for CUDA tensors; rows of the input are contiguous and begin at multiples of 16 bytes."""
    if scheme not in _FORMATS:
        raise ArgumentError(f"linear: scheme {scheme!r} has no tiled records; use {', '.join(_FORMATS)}")
    if out is None:
        out = torch.empty((*input.shape[:-1], weight.outputs), dtype=input.dtype, device=input.device)
    _linear[input.get_device()](out, input, weight.records, bias, _FORMATS[scheme])
    return out
