"""CPU rows of `linear` that keep a quantised weight quantised, from FBGEMM's embedding operators, which torch ships.

FBGEMM stores an embedding table row by row as codes followed by that row's scale and bias, and has vectorised code to
unpack such rows and to add up weighted rows ("bags"). With 32 weights to a row that is the block formats of GGUF up to
the order of bytes, so two of its operators give two rows:

unpack    A block is a table row of 32 columns. Unpacking writes the dense weight in one pass, about as fast as memory
          allows and exactly as d * q + m rounds; a GEMM over a piece that is still in the cache follows.
bag       For few tokens. A table row holds the codes of one input feature for `TILE` outputs, a bag is the 32 features
          of a block, weighted by the input: P[block, n] = sum_j x[j] q[n, j]. Then y[n] = sum over blocks of d P, plus
          m times the block's sum of x. All in fp32: codes are small integers, so nothing is rounded but sums and
          products. It reads 1 byte a weight where a dense product reads 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import BLOCK, BLOCK_BYTES
from rapid_llm.kernels.ops.gemm.linear_torch import DENSE, check_weight, deliver, rows_of
from rapid_llm.kernels.ops.gemm.precision import exact_linear
from rapid_llm.platform import cpu_info

NIBBLE_ROW: Final = 20
"""Bytes of a table row of 32 4-bit codes: 16, fp16 scale, fp16 bias."""

BYTE_ROW: Final = 40
"""Bytes of a table row of 32 8-bit codes: 32, fp32 scale, fp32 bias."""

PIECE: Final = 2**21
"""Weights unpacked at a time: 8 MiB of fp32, inside a last-level cache."""

TILE: Final = 96
"""Outputs in a row of a bag's table: 104 bytes with scale and bias. Wider rows gain nothing, narrower ones read more
scales and indices."""

BAG_ROWS: Final = 8
"""Rows of input that a call of the bag operator takes at most, which bounds its indices."""

_CENTRE: Final = {"q8_0": 128, "q4_0": 8, "q4_1": 8}
"""What a stored code exceeds the integer it stands for by."""


def available() -> bool | str:
    """FBGEMM's embedding operators, asked for values that they must get right."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return "this torch has no FBGEMM for this CPU"
    codes = torch.tensor([[0x21]], dtype=torch.uint8)
    scales = torch.tensor([[0.5, -3.0]], dtype=torch.float16).view(torch.uint8)
    unpacked = torch.ops.quantized.embedding_bag_4bit_unpack(torch.cat((codes, scales), 1))
    table = torch.cat((codes, torch.tensor([[2.0, -60.0]]).view(torch.uint8)), 1)
    bag = _bags(table, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.tensor([0.5]))
    if unpacked.tolist() == [[-2.5, -2.0]] and bag.tolist() == [[3.0]]:
        return True
    return f"FBGEMM unpacked {unpacked.tolist()} for [[-2.5, -2.0]] and summed {bag.tolist()} for [[3.0]]"


def available_bf16() -> bool | str:
    """The same, on a CPU that makes bf16 products in hardware; elsewhere they are slower than fp32's."""
    if {"avx512_bf16", "amx_bf16"} & set(cpu_info().isa):
        return available()
    return "the CPU has no bf16 arithmetic (avx512_bf16 or amx_bf16)"


# -- unpack -----------------------------------------------------------------------------------------------------------


def pack_blocks(weight: Tensor, scheme: str) -> Tensor:
    """Holds the weight's blocks in FBGEMM's order of bytes, (out_features, blocks, 20 or 40) uint8: 20 bytes for 32
    weights of q4_0 and q4_1, 40 for q8_0, and for a q4_0 whose 8 d leaves fp16's range."""
    blocks = weight.reshape(-1, BLOCK_BYTES[scheme])
    scale = _bytes(blocks, 0, 2)
    if scheme == "q4_1":
        table = torch.cat((_nibbles(blocks), scale, _bytes(blocks, 2, 4)), 1)
    else:
        wide = scale.view(torch.float16).float()
        shift = wide * -_CENTRE[scheme]
        half = shift.half()
        if scheme == "q4_0" and bool(torch.isfinite(half).all()):
            table = torch.cat((_nibbles(blocks), scale, half.view(torch.uint8)), 1)
        else:
            table = torch.cat((_codes(blocks, scheme), wide.view(torch.uint8), shift.view(torch.uint8)), 1)
    return table.view(weight.shape[0], weight.shape[1] // BLOCK_BYTES[scheme], table.shape[1])


def linear_unpack(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = DENSE
) -> Tensor:
    """fp32 GEMM over unpacked pieces of the weight."""
    check_weight(weight, input, torch.uint8, 3)
    outputs, features = weight.shape[0], weight.shape[1] * BLOCK
    rows = rows_of(input, features, outputs, bias)
    count = max(1, PIECE // max(features, 1))
    if outputs <= count:
        return deliver(exact_linear(rows, _unpack(weight)), input, bias, out)
    product = rows.new_empty(rows.shape[0], outputs)
    for first in range(0, outputs, count):
        product[:, first : first + count] = exact_linear(rows, _unpack(weight[first : first + count]))
    return deliver(product, input, bias, out)


def linear_unpack_bf16(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = DENSE
) -> Tensor:
    """bf16 GEMM over unpacked pieces of the weight: input, weight and product are rounded to bf16, sums are fp32.

    A bias would be added to a product that is rounded already, so a layer that has one goes by fp32.
    """
    if bias is not None:
        return linear_unpack(input, weight, bias, out, scheme=scheme)
    check_weight(weight, input, torch.uint8, 3)
    outputs, features = weight.shape[0], weight.shape[1] * BLOCK
    rows = rows_of(input, features, outputs, bias).bfloat16()
    count = max(1, min(outputs, PIECE // max(features, 1)))
    product = torch.empty(rows.shape[0], outputs)
    scratch = torch.empty(count, features, dtype=torch.bfloat16)
    for first in range(0, outputs, count):
        part = weight[first : first + count]
        dense = scratch[: part.shape[0]].copy_(_unpack(part))
        product[:, first : first + count] = torch.nn.functional.linear(rows, dense)
    return deliver(product, input, bias, out)


def _unpack(weight: Tensor) -> Tensor:
    """(rows, blocks, bytes) to (rows, weights) fp32."""
    ops = torch.ops.quantized
    unpack = ops.embedding_bag_4bit_unpack if weight.shape[2] == NIBBLE_ROW else ops.embedding_bag_byte_unpack
    return unpack(weight.view(-1, weight.shape[2])).view(weight.shape[0], -1)


# -- bag --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Bags:
    """A weight as tables of codes for `_bags`, for `tiles` tiles of `tile` outputs; those beyond `outputs` are 0.

    table: (tiles * features, tile + 8) uint8. scale: (tiles, blocks, tile) fp32. offset: (blocks, outputs) fp32, None
    where it is 0. index, starts: int32, row k to bag k // 32; shared by weights of one size.
    """

    table: Tensor
    scale: Tensor
    offset: Tensor | None
    index: Tensor
    starts: Tensor
    outputs: int
    features: int

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.table, self.scale, self.offset) if t is not None)


def pack_bags(weight: Tensor, scheme: str) -> Bags:
    """Holds the codes transposed, a byte each, and scales in fp32: 1.2 bytes a weight, 1.3 for q4_1."""
    outputs, blocks = weight.shape[0], weight.shape[1] // BLOCK_BYTES[scheme]
    features = blocks * BLOCK
    tile = min(TILE, -(-outputs // 8) * 8)
    tiles = -(-outputs // tile) if tile else 0
    split = weight.reshape(-1, BLOCK_BYTES[scheme])
    table = torch.zeros(tiles, features, tile + 8, dtype=torch.uint8)
    scale = torch.zeros(tiles, tile, blocks)
    d = _bytes(split, 0, 2).view(torch.float16).float()
    scale.view(tiles * tile, blocks)[:outputs] = d.view(outputs, blocks)
    codes = torch.zeros(tiles * tile, features, dtype=torch.uint8)
    codes[:outputs] = _codes(split, scheme).view(outputs, features)
    table[:, :, :tile] = codes.view(tiles, tile, features).transpose(1, 2)
    table[:, :, tile:] = torch.tensor([1.0, -float(_CENTRE[scheme])]).view(torch.uint8)
    offset = None
    if scheme == "q4_1":
        m = _bytes(split, 2, 4).view(torch.float16).float()
        offset = (m + _CENTRE[scheme] * d).view(outputs, blocks).t().contiguous()
    return Bags(
        table=table.view(-1, tile + 8),
        scale=scale.transpose(1, 2).contiguous(),
        offset=offset,
        index=_index(tiles * features, 1),
        starts=_index(tiles * features, BLOCK),
        outputs=outputs,
        features=features,
    )


def linear_bag(
    input: Tensor, weight: Bags, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = DENSE
) -> Tensor:
    """fp32 by weighted sums of table rows."""
    rows = rows_of(input, weight.features, weight.outputs, bias)
    if rows.shape[0] <= BAG_ROWS:
        return deliver(_by_bags(rows, weight), input, bias, out)
    return deliver(torch.cat([_by_bags(part, weight) for part in rows.split(BAG_ROWS)]), input, bias, out)


def _by_bags(rows: Tensor, weight: Bags) -> Tensor:
    """(count, features) to (count, outputs). Rows of input take turns over each tile, which then is in the cache."""
    tiles, blocks, tile = weight.scale.shape
    count = rows.shape[0]
    if count == 0 or tiles == 0 or blocks == 0:
        return rows.new_zeros(count, weight.outputs)
    if count == 1:
        weights = torch.cat([rows.reshape(-1)] * tiles)
        sums = _bags(weight.table, weight.index, weight.starts, weights).view(tiles, blocks, tile)
        product = sums.mul_(weight.scale).sum(1).view(1, -1)
    else:
        index = weight.index.view(tiles, 1, -1).expand(-1, count, -1).reshape(-1)
        weights = rows.expand(tiles, -1, -1).reshape(-1).contiguous()  # the operator does not look at strides
        sums = _bags(weight.table, index, _index(index.numel(), BLOCK), weights).view(tiles, count, blocks, tile)
        product = sums.mul_(weight.scale.unsqueeze(1)).sum(2).transpose(0, 1).reshape(count, -1)
    if tiles * tile != weight.outputs:
        product = product[:, : weight.outputs].contiguous()
    if weight.offset is None:
        return product
    return torch.addmm(product, rows.reshape(count, blocks, BLOCK).sum(2), weight.offset)


def _bags(table: Tensor, index: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Sums of table rows: row index[i] times weights[i], in bags of the i from one start to the next."""
    rowwise = torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default
    return rowwise(table, index, starts, False, 0, False, weights, None, False)


@lru_cache(maxsize=64)
def _index(stop: int, step: int) -> Tensor:
    return torch.arange(0, stop, step, dtype=torch.int32)


# -- the blocks' parts ------------------------------------------------------------------------------------------------


def _bytes(blocks: Tensor, start: int, stop: int) -> Tensor:
    """Bytes start to stop of each block, copied out, for they may lie at odd addresses."""
    return blocks[:, start:stop].clone(memory_format=torch.contiguous_format)


def _codes(blocks: Tensor, scheme: str) -> Tensor:
    """(blocks, 32) uint8: each weight's integer plus `_CENTRE`."""
    if scheme == "q8_0":
        return blocks[:, 2:] ^ 128  # two's complement to offset binary
    packed = blocks[:, -(BLOCK // 2) :]
    return torch.cat((packed & 15, packed >> 4), 1)


def _nibbles(blocks: Tensor) -> Tensor:
    """(blocks, 16) uint8 with weights 2 i and 2 i + 1 in byte i, where GGUF has i and i + 16."""
    packed = blocks[:, -(BLOCK // 2) :]
    even, odd = packed[:, 0::2], packed[:, 1::2]
    return torch.cat(((even & 15) | (odd << 4), (even >> 4) | (odd & 240)), 1)
