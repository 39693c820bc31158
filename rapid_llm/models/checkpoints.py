"""Quantised checkpoints of the Hugging Face world: what their `quantization_config` says, and their tensors as rows of
a `scheme` of `linear`.

A conversion never changes a weight: codes, zero points and scales are only laid out anew. What no scheme can hold
exactly (groups that are out of order, 8 bits in groups, scales beyond fp16) becomes dense fp32 numbers instead.
Activations are not quantised, although some of these formats would allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import FP8, FP8_CHANNEL, GROUP, INT8_CHANNEL
from rapid_llm.kernels.ops.gemm import fp8_block128, scaled_rows

from .checkpoint_configs import (
    Config,
    check_awq,
    check_bitsandbytes,
    check_compressed,
    check_fp8,
    gptq_bits,
)
from .errors import TensorSetError, UnsupportedQuantizationError
from .quant import UNQUANTIZED
from .weights import Weight

Tensors = Mapping[str, Tensor]
"""The tensors of one linear layer by the last part of their names: `qweight`, `scales`."""

AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring columns each nibble of an AWQ word holds, lowest nibble first."""


def from_gptq(tensors: Tensors, config: Config) -> Weight:
    """qweight (in / (32 / bits), out) int32, codes of one column in a word, lowest first; qzeros (groups, out / (32 /
    bits)) int32, less one in the first version of the format; scales (groups, out); g_idx (in,), each input's group.

    w = scale * (code - zero). 4 bits become int4 groups; 8 bits of one symmetric group become int8_channel.
    """
    bits = gptq_bits(config)
    qweight, scales = _need(tensors, "qweight", torch.int32), _need(tensors, "scales")
    columns, rows = qweight.shape[0] * 32 // bits, qweight.shape[1]
    packed = qweight.t().contiguous().view(torch.uint8)
    zeros = _fields(_need(tensors, "qzeros", torch.int32), bits).short()[:, :rows].t()
    if config.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = zeros + 1
    size = columns if config["group_size"] == -1 else int(config["group_size"])
    if size <= 0 or -(-columns // size) != scales.shape[0]:
        raise TensorSetError(
            f"{scales.shape[0]} groups of scales for {columns} inputs in groups of {size} (group_size)"
        )
    index = tensors.get("g_idx", _runs(columns, size, scales.device))
    return _Grouped(packed, bits, scales.t(), zeros).weight(index)


def from_awq(tensors: Tensors, config: Config) -> Weight:
    """qweight (in, out / 8) int32, eight outputs a word in the order `AWQ_ORDER`; qzeros (groups, out / 8) alike;
    scales (groups, out). w = scale * (code - zero)."""
    check_awq(config)
    codes = _awq_columns(_need(tensors, "qweight", torch.int32)).t()
    zeros = _awq_columns(_need(tensors, "qzeros", torch.int32)).t()
    pairs = codes[:, ::2] | (codes[:, 1::2] << 4)
    return _Grouped(pairs, 4, _need(tensors, "scales").t(), zeros).weight(None)


def from_compressed_tensors(tensors: Tensors, config: Config) -> Weight:
    """weight, e4m3 or int8, with weight_scale for all, for each row, for groups or for blocks; or weight_packed (out,
    in / (32 / bits)) int32 with weight_shape, codes that are more by 2**(bits - 1) than the numbers they stand for.

    weight_zero_point: of weight's dtype, or packed along the rows; absent where it is 0. weight_g_idx: inputs' groups.
    """
    check_compressed(config)
    if "weight_packed" not in tensors:
        return _scaled(_need(tensors, "weight"), _need(tensors, "weight_scale"), tensors.get("weight_zero_point"))
    packed, scales = _need(tensors, "weight_packed", torch.int32), _need(tensors, "weight_scale")
    rows, columns = _need(tensors, "weight_shape").tolist()
    bits = next((b for b in (4, 8) if -(-columns * b // 32) == packed.shape[1]), 0)
    if not bits or packed.shape[0] != rows:
        raise TensorSetError(f"weight_packed is {tuple(packed.shape)} int32, not {rows, columns} codes of 4 or 8 bits")
    raw = packed.contiguous().view(torch.uint8)[:, : columns * bits // 8]
    stored, zeros = tensors.get("weight_zero_point"), torch.full(scales.shape, 1 << (bits - 1), dtype=torch.int16)
    if stored is not None:
        zeros = _fields(stored.t().contiguous(), bits).short()[:, :rows].t()
    index = tensors.get("weight_g_idx")
    unset = index is None or bool((index < 0).all())
    return _Grouped(raw, bits, scales, zeros.to(scales.device)).weight(None if unset else index)


def from_fp8(tensors: Tensors, config: Config) -> Weight:
    """weight e4m3 with weight_scale_inv, a scale for each block of 128 by 128, or weight_scale, one for all."""
    check_fp8(config)
    scale = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    if scale is None:
        raise TensorSetError("an fp8 weight has neither weight_scale_inv nor weight_scale beside it")
    return _scaled(_need(tensors, "weight", torch.float8_e4m3fn), scale, None)


def from_bitsandbytes(tensors: Tensors, config: Config) -> Weight:
    """weight int8 with SCB, the largest magnitude of each row: w = code * SCB / 127."""
    check_bitsandbytes(config)
    layout = tensors.get("weight_format")
    if layout is not None and int(layout) != 0:
        raise UnsupportedQuantizationError(f"weight_format is {int(layout)}; only rows (0) are read")
    return _scaled(_need(tensors, "weight", torch.int8), _need(tensors, "SCB").float() / 127, None)


# Layouts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Grouped:
    """codes: (rows, columns * bits / 8) bytes, lowest bits first. scales, zeros: (rows, groups)."""

    codes: Tensor
    bits: int
    scales: Tensor
    zeros: Tensor

    def weight(self, index: Tensor | None) -> Weight:
        """index: each column's group; None where groups are equal runs of columns."""
        rows, columns = self.codes.shape[0], self.codes.shape[1] * 8 // self.bits
        shape, groups = (rows, columns), self.scales.shape[1]
        if self.scales.shape != self.zeros.shape or self.scales.shape[0] != rows or not groups:
            raise TensorSetError(
                f"{rows} rows take scales and zero points of shape ({rows}, groups), got "
                f"{tuple(self.scales.shape)} and {tuple(self.zeros.shape)}"
            )
        if index is None and columns % groups:
            raise TensorSetError(f"{columns} columns do not divide into {groups} groups")
        size = columns // groups
        runs = _runs(columns, size, self.codes.device)
        each = runs if index is None else index.long()
        if columns % groups == 0 and torch.equal(each, runs):
            whole = self._as_int4(size) if self.bits == 4 else self._as_int8()
            if whole is not None:
                return Weight(*whole, shape)
        return Weight(self._dense(each), UNQUANTIZED, shape)

    def _as_int4(self, size: int) -> tuple[Tensor, str] | None:
        """Groups of `size` columns as parts of 128, 64 or 32; None where those do not divide it, or fp16 is too small
        or too short for the scales."""
        group = next((g for g in (128, 64, 32) if size % g == 0), 0)
        if not group or not torch.equal(self.scales.half().float(), self.scales.float()):
            return None
        scales, zeros = (t.repeat_interleave(size // group, 1) for t in (self.scales, self.zeros))
        return scaled_rows.join_groups(self.codes, scales, zeros, group), f"int4_group{group}"

    def _as_int8(self) -> tuple[Tensor, str] | None:
        """One group a row, and symmetric; None otherwise."""
        if self.scales.shape[1] > 1 or self.codes.shape[1] % 16 or not bool((self.zeros == 128).all()):
            return None
        return scaled_rows.pack_channel((self.codes ^ 128).view(torch.int8), self.scales, INT8_CHANNEL), INT8_CHANNEL

    def _dense(self, each: Tensor) -> Tensor:
        codes = self.codes if self.bits == 8 else torch.stack((self.codes & 15, self.codes >> 4), 2).flatten(1)
        if int(each.min()) < 0 or int(each.max()) >= self.scales.shape[1]:
            raise TensorSetError(f"g_idx holds {int(each.max())}; there are {self.scales.shape[1]} groups")
        dense = codes.float().sub_(self.zeros.float().index_select(1, each))
        return dense.mul_(self.scales.float().index_select(1, each))


def _scaled(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Weight:
    """Codes of a byte with a scale for all of them, for each row, for equal runs of a row, or for blocks."""
    rows, columns = codes.shape
    scheme = {torch.float8_e4m3fn: FP8_CHANNEL, torch.int8: INT8_CHANNEL}.get(codes.dtype)
    if scheme is None:
        raise UnsupportedQuantizationError(f"a weight of {codes.dtype} is not read; float8_e4m3fn and int8 are")
    shape, moved = (rows, columns), zero is not None and bool((zero != 0).any())
    whole = scale.numel() == 1 or scale.shape in ((rows,), (rows, 1))
    if whole and not moved and columns % 16 == 0:
        return Weight(scaled_rows.pack_channel(codes, scale.reshape(-1), scheme), scheme, shape)
    blocks = (-(-rows // GROUP), -(-columns // GROUP))
    if scale.shape == blocks and scheme == FP8_CHANNEL and not moved and columns % GROUP == 0:
        return Weight(fp8_block128.pack(codes, scale), FP8, shape)
    each = _spread(scale, rows, columns, in_blocks=scale.shape == blocks)
    dense = codes.float()
    if zero is not None and moved:
        dense.sub_(_spread(zero, rows, columns, in_blocks=False))
    return Weight(dense.mul_(each), UNQUANTIZED, shape)


def _spread(scale: Tensor, rows: int, columns: int, *, in_blocks: bool) -> Tensor:
    """A number for each weight, or for each row."""
    values = scale.float()
    if values.numel() == 1:
        return values.reshape(1, 1)
    if in_blocks:
        return values.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :columns]
    values = values.reshape(rows, -1) if values.shape[:1] == (rows,) else values
    if values.dim() != 2 or values.shape[0] != rows or columns % values.shape[1]:
        raise TensorSetError(f"scales of shape {tuple(scale.shape)} do not belong to a weight of {rows, columns}")
    return values.repeat_interleave(columns // values.shape[1], 1)


def _fields(words: Tensor, bits: int) -> Tensor:
    """The fields of (a, b) int32 words, lowest first: (a, b * 32 / bits) uint8."""
    raw = words.contiguous().view(torch.uint8)
    return raw if bits == 8 else torch.stack((raw & 15, raw >> 4), 2).flatten(1)


def _awq_columns(words: Tensor) -> Tensor:
    """(a, b) int32 words to (a, 8 b) uint8, columns in their own order."""
    place = torch.tensor([AWQ_ORDER.index(column) for column in range(8)], device=words.device)
    return _fields(words, 4).unflatten(1, (-1, 8)).index_select(2, place).flatten(1)


def _runs(columns: int, size: int, device: torch.device) -> Tensor:
    """Each column's group where groups are runs of `size` columns."""
    return torch.arange(columns, device=device) // size


def _need(tensors: Tensors, name: str, dtype: torch.dtype | None = None) -> Tensor:
    if name not in tensors:
        raise TensorSetError(f"'{name}' is missing beside {', '.join(sorted(tensors))}")
    if dtype is not None and tensors[name].dtype is not dtype:
        raise TensorSetError(f"'{name}' holds {tensors[name].dtype}, not {dtype}")
    return tensors[name]


# The way in ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Method:
    """marks: a linear layer with any of these tensors is quantised. others: what may lie beside them."""

    marks: tuple[str, ...]
    others: tuple[str, ...]
    check: Callable[[Config], object]
    read: Callable[[Tensors, Config], Weight]


METHODS: Final[Mapping[str, _Method]] = MappingProxyType(
    {
        "gptq": _Method(("qweight",), ("qzeros", "scales", "g_idx"), gptq_bits, from_gptq),
        "awq": _Method(("qweight",), ("qzeros", "scales"), check_awq, from_awq),
        "compressed-tensors": _Method(
            ("weight_packed", "weight_scale"),
            ("weight", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point"),
            check_compressed,
            from_compressed_tensors,
        ),
        "fp8": _Method(("weight_scale_inv", "weight_scale"), ("weight", "input_scale"), check_fp8, from_fp8),
        "bitsandbytes": _Method(("SCB",), ("weight", "weight_format"), check_bitsandbytes, from_bitsandbytes),
    }
)
"""quant_method -> how its linear layers are read."""


@dataclass(slots=True)
class Reader:
    """Reads the quantised linear layers of one checkpoint. path: for messages. dense: names of the layers that had to
    become dense numbers."""

    config: Config
    method: _Method
    path: object
    dense: list[str] = field(default_factory=list)

    def parts(self, names: Collection[str], at: str) -> tuple[str, ...]:
        """The tensors of the linear layer `at`, by the last part of their names; () where it is not quantised."""
        if not any(f"{at}.{mark}" in names for mark in self.method.marks):
            return ()
        return tuple(part for part in (*self.method.marks, *self.method.others) if f"{at}.{part}" in names)

    def read(self, tensors: Tensors, at: str) -> Weight:
        """The layer's weight from the tensors that `parts` named; errors name the layer."""
        try:
            weight = self.method.read(tensors, self.config)
        except (TensorSetError, UnsupportedQuantizationError) as error:
            raise type(error)(f"{self.path}: {at}: {error}") from error
        if weight.scheme == UNQUANTIZED:
            self.dense.append(at)
        return weight


def reader(config: Config, path: object) -> Reader:
    """What reads the checkpoint at `path` with this `quantization_config`.

    Raises `UnsupportedQuantizationError`, which names the field and its value, where it is of no known method or asks
    for what that method's reader does not do.
    """
    name = config.get("quant_method")
    if name not in METHODS:
        raise UnsupportedQuantizationError(
            f"{path}: quantization_config.quant_method is {name!r}; supported: {', '.join(map(repr, METHODS))}"
        )
    method = METHODS[str(name)]
    try:
        method.check(config)
    except UnsupportedQuantizationError as error:
        raise UnsupportedQuantizationError(f"{path}: {error}") from error
    return Reader(config, method, path)
