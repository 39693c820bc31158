"""What a side of a comparison runs, read from text such as `linear=native, dtype=bf16`; and its decoder."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from rapid_llm.engine.loading import resolve_device
from rapid_llm.engine.options import PAGE_SIZE
from rapid_llm.kernels import Selected, dispatch
from rapid_llm.kernels.registry import errors, get_op, ops, overrides, plugins
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import Decoder, activation_dtype
from rapid_llm.models.gguf import GGUFFile
from rapid_llm.models.op_table import OPS
from rapid_llm.models.quant import UNQUANTIZED, dequantize
from rapid_llm.models.weights import LayerWeights, ModelWeights, Weight, load_weights

REFERENCE: Final = "hf"
DEQUANTISED: Final = "dequantised"
SYNTAX: Final = (
    "a configuration is a list of OP=ROW, BACKEND or ROW (for every op that has it), dtype=..., device=..., "
    f"{DEQUANTISED}; or {REFERENCE} alone; or nothing, which is what the engine runs by default"
)


@dataclass(frozen=True, slots=True)
class Configuration:
    """rows: (op id, or None for every op that has it; a backend or row name), the last one that fits a call wins.

    A row is forced only where it can run: a row for a few tokens leaves the calls with more to dispatch. reference:
    Hugging Face transformers, which has no rows.
    """

    text: str
    rows: tuple[tuple[str | None, str], ...] = ()
    dtype: str = "auto"
    device: str = "auto"
    dequantised: bool = False
    reference: bool = False

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """Items are separated by commas or blanks. Raises `ValueError`, or the registry's errors, for unknown ones."""
        plugins.scan()
        items = text.replace(",", " ").split()
        if REFERENCE in items:
            if len(items) > 1:
                raise ValueError(f"{text!r}: {REFERENCE} is transformers in float32 on the CPU, and takes nothing else")
            return cls(REFERENCE, dtype="float32", device="cpu", dequantised=True, reference=True)
        made = cls(", ".join(items) or "default")
        for item in items:
            made = made._with(item)
        return made

    def _with(self, item: str) -> Configuration:
        name, equals, value = item.partition("=")
        if not equals:
            if name == DEQUANTISED:
                return replace(self, dequantised=True)
            if "=" not in item and name not in _known(None):
                raise ValueError(f"{item!r} is no backend and no row; {SYNTAX}")
            return replace(self, rows=(*self.rows, (None, name)))
        if not value:
            raise ValueError(f"{item!r} has no value; {SYNTAX}")
        if name == "dtype":
            return replace(self, dtype=value)
        if name == "device":
            return replace(self, device=value)
        op = next((o.id for o in ops() if name in (o.id, o.function)), name)
        if get_op(op).id not in OPS:
            raise ValueError(f"{item!r}: the decoder never calls {op}; it calls {', '.join(OPS)}")
        overrides.rows_of(value, op)  # an unknown row is an error now, with the nearest name
        return replace(self, rows=(*self.rows, (op, value)))


def _known(op: str | None) -> set[str]:
    names: set[str] = set()
    for row in (r for o in ops() if op in (None, o.id) for r in _rows(o.id)):
        names |= {row.backend, row.name}
    return names


def _rows(op: str) -> Any:
    from rapid_llm.kernels.registry import rows

    return rows(op)


@dataclass(slots=True)
class Chooser:
    """Stands in for `dispatch`: the configuration's rows where they can run, the usual choice elsewhere."""

    rows: tuple[tuple[str | None, str], ...]
    _fitted: set[tuple[str | None, str]] = field(default_factory=set)
    _refusals: dict[tuple[str | None, str], str] = field(default_factory=dict)

    def __call__(self, op: str, **facts: Any) -> Selected:
        for wanted in reversed(self.rows):
            target, what = wanted
            if target not in (None, op) or what not in _known(op):
                continue
            try:
                handle = dispatch(op, backend=what, **facts)
            except errors.ForcedRowError as error:
                self._refusals.setdefault(wanted, str(error))
            else:
                self._fitted.add(wanted)
                return handle
        return dispatch(op, **facts)

    def check(self) -> None:
        """Raise `ValueError` for a row that was asked for and could run no call: a comparison without it says
        nothing."""
        for wanted in self.rows:
            if wanted not in self._fitted:
                why = self._refusals.get(wanted, "this model makes no such call, or a later item takes all of them")
                raise ValueError(f"{wanted[1]} runs no call of this model: {why}")


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """A configuration with its decoder. weights: as loaded, which the oracle reads whatever form the rows read."""

    configuration: Configuration
    decoder: Decoder
    weights: ModelWeights

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.activation_dtype

    def same_numbers(self, other: Side) -> bool:
        """Whether a call with one row name computes the same on both sides."""
        return (self.device, self.dtype, self.configuration.dequantised) == (
            other.device,
            other.dtype,
            other.configuration.dequantised,
        )

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.configuration.text} ({kind} activations on {self.device})"


def build(file: GGUFFile, config: ModelConfig, configuration: Configuration) -> Side:
    """Load the model as `configuration` says; the errors of loading, of dispatch, and `ValueError` for values."""
    device = resolve_device(configuration.device)
    dtype = activation_dtype(configuration.dtype, device)
    weights = load_weights(file, config, device=device, dtype=dtype)
    if configuration.dequantised:
        weights = _dequantised(weights, dtype)
    chooser = Chooser(configuration.rows)
    decoder = Decoder(config, weights, device=device, dtype=configuration.dtype, page_size=PAGE_SIZE, choose=chooser)
    chooser.check()
    return Side(configuration, decoder, weights)


def _dequantised(weights: ModelWeights, dtype: torch.dtype) -> ModelWeights:
    """The same model with every matrix dense; a head that is the embedding stays that very object."""
    embedding = _dense(weights.embedding, dtype)
    return replace(
        weights,
        embedding=embedding,
        head=embedding if weights.head is weights.embedding else _dense(weights.head, dtype),
        layers=tuple(_dense_layer(layer, dtype) for layer in weights.layers),
    )


def _dense_layer(layer: LayerWeights, dtype: torch.dtype) -> LayerWeights:
    """`layer` with its matrices dense; experts are dense already."""
    names = [name for name in layer.linears() if name != "router"]
    made = {name: _dense(getattr(layer, name), dtype) for name in names}
    if layer.experts is None:
        return replace(layer, **made)
    return replace(layer, **made, experts=replace(layer.experts, router=_dense(layer.experts.router, dtype)))


def _dense(weight: Weight, dtype: torch.dtype) -> Weight:
    if weight.scheme == UNQUANTIZED:
        return weight
    return Weight(dequantize(weight.data, weight.scheme).to(dtype), UNQUANTIZED, weight.shape)
