"""Weights in the forms that the chosen rows read: as loaded, or packed once per distinct form.

A quantised layer may be wanted as int4 tiles for one token and as a dense matrix for many. Each form is made once; the
loaded blocks themselves are let go where no row reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rapid_llm.kernels import Selected

from .op_table import LinearKey, OpTable
from .quant import UNQUANTIZED
from .weights import ModelWeights, Weight


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """One linear layer: for each bucket, the row's handle and the weight in the form that it reads. nbytes: of the
    matrix as it was loaded."""

    scheme: str
    bias: Tensor | None
    choices: tuple[tuple[Selected, Any], ...]
    nbytes: int

    def read_bytes(self, bucket: int) -> int:
        """The least that a call reads of the matrix: what was loaded, or the row's own form where that is smaller."""
        return min(self.nbytes, _held([self.choices[bucket][1]], set()))


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One decoder layer. norms, linears: by the names of `LayerWeights`, what the layer lacks left out. experts: their
    gate_up and down, where it has a choice of them."""

    norms: Mapping[str, Tensor]
    linears: Mapping[str, PackedLinear]
    experts: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True, eq=False)
class PackedModel:
    """A whole model, ready to be called."""

    embedding: Weight
    layers: tuple[PackedLayer, ...]
    final_norm: Tensor
    head: PackedLinear

    def read_bytes(self, bucket: int) -> tuple[int, int]:
        """(every weight that a step reads once however many tokens it has, the experts), the embedding in neither."""
        vectors = [self.final_norm, *(norm for layer in self.layers for norm in layer.norms.values())]
        linears = [self.head, *(linear for layer in self.layers for linear in layer.linears.values())]
        vectors += [linear.bias for linear in linears if linear.bias is not None]
        every = sum(linear.read_bytes(bucket) for linear in linears) + sum(int(v.nbytes) for v in vectors)
        return every, sum(int(t.nbytes) for layer in self.layers for t in layer.experts or ())

    def memory(self) -> dict[str, int]:
        """Bytes held: `weights_quantized` and `weights_dense` as loaded, `weights_packed` copies for rows that read a
        form of their own. Memory that several of them share is counted once, under the first."""
        seen: set[int] = set()
        vectors = [self.final_norm]
        linears = [self.head]
        for layer in self.layers:
            linears += layer.linears.values()
            vectors += [*layer.norms.values(), *(layer.experts or ())]
        vectors += [linear.bias for linear in linears if linear.bias is not None]
        raw = {UNQUANTIZED: [*vectors], "blocks": []}
        packed: list[Any] = []
        for scheme, form in [(self.embedding.scheme, self.embedding.data), *_raw_forms(linears)]:
            raw[UNQUANTIZED if scheme == UNQUANTIZED else "blocks"].append(form)
        for linear in linears:
            packed += [form for handle, form in linear.choices if handle.spec.prepack is not None]
        return {
            "weights_quantized": _held(raw["blocks"], seen),
            "weights_dense": _held(raw[UNQUANTIZED], seen),
            "weights_packed": _held(packed, seen),
        }


def linear_kinds(weights: ModelWeights) -> dict[LinearKey, Weight]:
    """One example of each kind of linear layer in the model."""
    kinds: dict[LinearKey, Weight] = {}
    for layer in weights.layers:
        for weight, bias in layer.linears().values():
            kinds.setdefault(_kind(weight, bias), weight)
    kinds.setdefault(_kind(weights.head, None), weights.head)
    return kinds


def pack(weights: ModelWeights, tables: Sequence[OpTable]) -> PackedModel:
    """Every linear layer of `weights` in every form that the rows of `tables` (one per bucket) read."""
    return PackedModel(
        embedding=weights.embedding,
        layers=tuple(
            PackedLayer(
                norms=layer.norms(),
                linears={name: _pack(weight, bias, tables) for name, (weight, bias) in layer.linears().items()},
                experts=None if layer.experts is None else (layer.experts.gate_up, layer.experts.down),
            )
            for layer in weights.layers
        ),
        final_norm=weights.final_norm,
        head=_pack(weights.head, None, tables),
    )


def _kind(weight: Weight, bias: Tensor | None) -> LinearKey:
    return weight.scheme, weight.shape, bias is not None


def _pack(weight: Weight, bias: Tensor | None, tables: Sequence[OpTable]) -> PackedLinear:
    forms: dict[str | None, Any] = {}
    choices = []
    for table in tables:
        handle = table.linears[_kind(weight, bias)]
        form = handle.spec.prepack
        if form not in forms:
            forms[form] = handle.prepack(weight.data)
        choices.append((handle, forms[form]))
    return PackedLinear(weight.scheme, bias, tuple(choices), weight.nbytes)


def _raw_forms(linears: Iterable[PackedLinear]) -> Iterator[tuple[str, Any]]:
    for linear in linears:
        for handle, form in linear.choices:
            if handle.spec.prepack is None:
                yield linear.scheme, form


def _held(forms: Iterable[Any], seen: set[int]) -> int:
    """Bytes of the distinct memory behind `forms`: tensors, sequences of tensors, or objects that tell `nbytes`."""
    total = 0
    for form in forms:
        if isinstance(form, (tuple, list)):
            total += _held(form, seen)
        elif isinstance(form, Tensor):
            storage = form.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        elif id(form) not in seen:
            seen.add(id(form))
            total += int(form.nbytes)
    return total
