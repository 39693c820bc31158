"""Tensor parallelism: which part of each matrix a rank holds, and the exchanges that make a model of the parts.

q, k, v, gate and up are cut by their rows, so that a rank has whole heads and its share of the features between; o and
down by their columns, so that what ranks compute are addends of one sum. Embedding and head are cut by the vocabulary,
which is padded with rows of zeros to a multiple of the ranks. (Megatron-LM, Shoeybi et al. 2019, section 3.)

Invariant: hidden states are the same on every rank; what differs is computed from a rank's own matrices and summed, or
gathered, before anything else reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import FORMATS, FP8, GROUP, row_bytes, row_elements

from .config import ModelConfig
from .errors import UnsupportedTensorError
from .quant import UNQUANTIZED
from .weights import ExpertWeights, LayerWeights, ModelWeights, Weight

Call = Callable[..., Any]


class ParallelError(ValueError):
    """A model cannot be cut among so many ranks, or this machine cannot run them."""


class Ranks:
    """This process's place among `count` processes, and what it exchanges with the others.

    index: from 0. The exchanges go through torch.distributed's default process group, which must be there by the first
    of them; every rank has to make the same ones in the same order. apart: while true nothing is exchanged and results
    are meaningless: what a rank computes by itself can be built and loaded without the others.
    """

    def __init__(self, index: int, count: int) -> None:
        if count < 1 or not 0 <= index < count:
            raise ParallelError(f"rank {index} of {count} ranks: use 0 to {count - 1}, of at least 1")
        self.index = index
        self.count = count
        self.apart = False

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in `tensor` itself, in its dtype; contiguous."""
        if not self.apart:
            torch.distributed.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(rows, n) of each rank side by side: (rows, count * n)."""
        parts = [torch.empty_like(tensor) for _ in range(self.count)]
        if not self.apart:
            torch.distributed.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=1)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's values, in `tensor` itself."""
        if not self.apart:
            torch.distributed.broadcast(tensor, src=0)
        return tensor

    def all_agree(self, mine: bool, device: torch.device) -> bool:
        """Whether `mine` is true on every rank. Waits for the device."""
        if self.apart:
            return mine
        vote = torch.tensor([mine], dtype=torch.int32, device=device)
        torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN)
        return bool(vote.item())

    def summed(self, call: Call) -> Call:
        """`call`, whose result is this rank's addend, followed by the sum."""

        def both(input: Tensor) -> Tensor:
            return self.all_reduce(call(input))

        return both

    def embedded(self, call: Call, rows: int) -> Call:
        """`call`, a look-up in this rank's `rows` rows of the table, for ids of the whole. The one rank that has an id
        contributes its row and the others zeros, so the sum is exact."""
        first = self.index * rows

        def both(input_ids: Tensor) -> Tensor:
            own = input_ids - first
            others = (own < 0) | (own >= rows)
            found: Tensor = call(own.masked_fill_(others, 0))
            return self.all_reduce(found.masked_fill_(others.unsqueeze(1), 0))

        return both

    def gathered(self, call: Call, vocab_size: int) -> Call:
        """`call`, the head over this rank's rows of the vocabulary, for the whole of it, without the padding."""

        def both(hidden: Tensor) -> Tensor:
            return self.all_gather(call(hidden))[:, :vocab_size]

        return both


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a matrix is held. rows: half-open ranges, None for all; columns: one range, None for all, in
    weights; pad: rows of zeros behind."""

    rows: tuple[tuple[int, int], ...] | None = None
    columns: tuple[int, int] | None = None
    pad: int = 0

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """(rows, columns) of what is left of such a matrix."""
        if self.rows is not None:
            rows = sum(end - start for start, end in self.rows) + self.pad
        return rows, columns if self.columns is None else self.columns[1] - self.columns[0]

    def __call__(self, data: Tensor, scheme: str = UNQUANTIZED, name: str = "a matrix") -> Tensor:
        """The part of `data`, (..., rows, weights or bytes of a row), a view where it can be.

        Raises `UnsupportedTensorError` where a range of columns would cut a block of `scheme`.
        """
        if self.rows is not None:
            if scheme == FP8:
                _on_borders((edge for ends in self.rows for edge in ends), GROUP, scheme, name, "rows")
            parts = [data.narrow(-2, start, end - start) for start, end in self.rows]
            if self.pad:
                parts.append(data.new_zeros(*data.shape[:-2], self.pad, data.shape[-1]))
            data = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        if self.columns is None:
            return data
        if scheme == UNQUANTIZED:
            return data[..., slice(*self.columns)]
        _on_borders(self.columns, FORMATS[scheme].weights, scheme, name, "weights along its rows")
        return _blocks(data, scheme, *self.columns)

    def vector(self, data: Tensor) -> Tensor:
        """The part of a vector that has an element for each row."""
        return self(data.unsqueeze(-1)).squeeze(-1)


WHOLE: Final = Cut()
"""Everything."""

_SCALE: Final = 4
"""Bytes of what a block has in the formats that keep it apart: an fp32 scale, or a scale and a zero point in fp16."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one rank. whole: the configuration of the complete model, which `check` has found to divide."""

    whole: ModelConfig
    index: int
    count: int

    def __post_init__(self) -> None:
        check(self.whole, self.count)

    @property
    def config(self) -> ModelConfig:
        """The configuration of a model that is as large as this rank's part; its vocabulary is the whole one."""
        c, n = self.whole, self.count
        sizes = {name: getattr(c, name) // n for name in ("num_heads", "num_kv_heads", *_features(c))}
        return replace(c, **sizes)

    def cut(self, part: str) -> Cut:
        """What this rank holds of a part, by its name in `names.Names`; of a fused part, or of `embedding` and `head`,
        the like. Norms and the router are whole."""
        c = self.whole
        rows = {
            "q": (c.q_size,),
            "k": (c.kv_size,),
            "v": (c.kv_size,),
            "qkv": (c.q_size, c.kv_size, c.kv_size),
            "gate": (c.intermediate_size,),
            "up": (c.intermediate_size,),
            "gate_up": (c.intermediate_size,) * 2,
            "experts_gate": (c.expert_size,),
            "experts_up": (c.expert_size,),
            "experts_gate_up": (c.expert_size,) * 2,
        }
        columns = {"o": c.q_size, "down": c.intermediate_size, "experts_down": c.expert_size}
        if part in ("embedding", "head"):
            return self._vocabulary()
        if part in columns:
            return Cut(columns=self._share(columns[part]))
        if part not in rows:
            return WHOLE
        ranges, offset = [], 0
        for size in rows[part]:
            start, end = self._share(size)
            ranges.append((offset + start, offset + end))
            offset += size
        return Cut(rows=tuple(ranges))

    def weights(self, whole: ModelWeights) -> ModelWeights:
        """This rank's part of a complete model, for weights that do not come from a file."""
        embedding = self._of(whole.embedding, "embedding")
        head = embedding if whole.head is whole.embedding else self._of(whole.head, "head")
        layers = tuple(map(self._layer, whole.layers))
        return replace(whole, embedding=embedding, head=head, layers=layers)

    def addend(self, bias: Tensor) -> Tensor:
        """A bias that is added to a sum over ranks: one of them adds it."""
        return bias if self.index == 0 else torch.zeros_like(bias)

    def _layer(self, layer: LayerWeights) -> LayerWeights:
        changes: dict[str, Any] = {"qkv": self._of(layer.qkv, "qkv"), "o": self._of(layer.o, "o")}
        if layer.qkv_bias is not None:
            changes["qkv_bias"] = self.cut("qkv").vector(layer.qkv_bias).clone()
        if layer.o_bias is not None:
            changes["o_bias"] = self.addend(layer.o_bias)
        if layer.gate_up is not None and layer.down is not None:
            changes |= {"gate_up": self._of(layer.gate_up, "gate_up"), "down": self._of(layer.down, "down")}
        if layer.experts is not None:
            gate_up, down = layer.experts.gate_up, layer.experts.down
            own = (_copy(self.cut("experts_gate_up")(gate_up)), _copy(self.cut("experts_down")(down)))
            changes["experts"] = ExpertWeights(layer.experts.router, *own)
        return replace(layer, **changes)

    def _of(self, weight: Weight, part: str) -> Weight:
        cut = self.cut(part)
        return Weight(_copy(cut(weight.data, weight.scheme, part)), weight.scheme, cut.shape(*weight.shape))

    def _share(self, size: int) -> tuple[int, int]:
        each = size // self.count
        return self.index * each, (self.index + 1) * each

    def _vocabulary(self) -> Cut:
        size, each = self.whole.vocab_size, -(-self.whole.vocab_size // self.count)
        start, end = (min(edge * each, size) for edge in (self.index, self.index + 1))
        return Cut(rows=((start, end),), pad=each - (end - start))


def check(config: ModelConfig, count: int) -> None:
    """Raise `ParallelError`, with the model's numbers and what counts work, where `count` ranks do not divide it."""
    if count in usable_counts(config):
        return
    sizes = [(config.num_heads, "query heads"), (config.num_kv_heads, "key/value heads")]
    sizes += [(getattr(config, name), what) for name, what in _features(config).items()]
    bad = " and ".join(f"{size} {what}" for size, what in sizes if size % count)
    known = ", ".join(map(str, usable_counts(config)))
    raise ParallelError(
        f"tensor_parallel={count}: the {bad} of {config.name} do not divide among {count} ranks; it has "
        f"{', '.join(f'{size} {what}' for size, what in sizes)}, for which {known} work"
    )


def usable_counts(config: ModelConfig) -> tuple[int, ...]:
    """Every number of ranks that divides the model."""
    sizes = [config.num_heads, config.num_kv_heads, *(getattr(config, name) for name in _features(config))]
    return tuple(n for n in range(1, config.num_kv_heads + 1) if not any(size % n for size in sizes))


def _features(config: ModelConfig) -> dict[str, str]:
    """The sizes between up and down that are cut, and what to call them."""
    sparse = [config.has_experts(i) for i in range(config.num_layers)]
    found = {"intermediate_size": "feed-forward features"} if not all(sparse) else {}
    return found | ({"expert_size": "features of an expert"} if any(sparse) else {})


def _on_borders(edges: Iterable[int], size: int, scheme: str, name: str, what: str) -> None:
    for edge in edges:
        if edge % size:
            raise UnsupportedTensorError(
                f"{name} is {scheme}, in blocks of {size} {what}, and a cut at {edge} is within one; use a "
                f"tensor_parallel that leaves each rank a multiple of {size}, or another quantisation"
            )


def _blocks(data: Tensor, scheme: str, start: int, end: int) -> Tensor:
    """Columns `start` to `end` of quantised rows: of each block its bytes or, where a format keeps scales apart, its
    codes, then its scale; then what the row has once, and zeros up to its alignment."""
    form, first, last = FORMATS[scheme], start // FORMATS[scheme].weights, end // FORMATS[scheme].weights
    if form.align == 1:
        return data[..., first * form.block : last * form.block]
    scale = 0 if form.tail else _SCALE
    blocks, codes = row_elements(data.shape[-1], scheme) // form.weights, form.block - scale
    at, tail = blocks * codes, blocks * form.block
    ranges = ((first * codes, last * codes), (at + first * scale, at + last * scale), (tail, tail + form.tail))
    pieces = [data[..., begin:stop] for begin, stop in ranges]
    used = sum(piece.shape[-1] for piece in pieces)
    pieces.append(data.new_zeros(*data.shape[:-1], row_bytes(end - start, scheme) - used))
    return torch.cat(pieces, dim=-1)


def _copy(data: Tensor) -> Tensor:
    """Memory of its own, so that what it was cut from can be freed."""
    return data.clone(memory_format=torch.contiguous_format)
