"""What a model would run as on this machine, told from its files' headers: no weight is read, no kernel is built.

Weights are loaded on to torch's `meta` device, which keeps shapes and dtypes alone; so the kinds of linear layers are
those that loading would make. Unpacking a quantised checkpoint of Hugging Face's manner, and quantising on load, look
at the numbers: for these, the first layers are really read, enough to hold every kind of layer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels import explain
from rapid_llm.models import names as naming
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import activation_dtype
from rapid_llm.models.op_table import Binder, Examples, buckets, ops_of
from rapid_llm.models.packing import linear_kinds
from rapid_llm.models.source import TensorSource
from rapid_llm.models.weights import ModelWeights, load_weights

from .explain import Binding
from .kv_memory import cache_dtype
from .options import PAGE_SIZE, EngineOptions

_META: Final = torch.device("meta")


def planned_rows(
    source: TensorSource, config: ModelConfig, options: EngineOptions, device: torch.device
) -> list[Binding]:
    """The row of every op that `config`'s decoder would call on `device`, for every range of token counts.

    `Binding.row` is empty where no row can run the call. Raises the errors of `load_weights` for tensors that do not
    fit or are of no known kind, and `ValueError` for a dtype or quantisation that the model cannot have.
    """
    dtype = activation_dtype(options.dtype, device)
    weights = _outline(source, config, dtype, options.quantization)
    binder = Binder(
        config,
        device=_META,
        dtype=dtype,
        allow_roundings=options.dtype == "auto" and device.type == "cpu",
        page_size=PAGE_SIZE,
        kv_dtype=cache_dtype(options.kv_cache_dtype),
    )
    experts = next((layer.experts for layer in weights.layers if layer.experts is not None), None)
    cos_sin = torch.empty((PAGE_SIZE, config.rotary_dim), device=_META)
    examples = Examples(weights.embedding, linear_kinds(weights), cos_sin, experts)
    found = []
    for bucket in buckets(device, ops_of(config)):
        for key in binder.keys(bucket, examples):
            op = key.pop("op")
            found.append(Binding.planned(str(bucket), op, explain(op, **{**key, "device": str(device)})))
    return found


def _outline(source: TensorSource, config: ModelConfig, dtype: torch.dtype, quantization: str | None) -> ModelWeights:
    there = frozenset(source.names())
    names = naming.find(there, config, source.path)
    if config.quantization is not None or quantization is not None:
        layers = _enough_layers(config)
        beyond = tuple(names.layer.format(number) for number in range(layers, config.num_layers))
        config = replace(
            config,
            num_layers=layers,
            windows=config.windows[:layers],
            dense_layers=tuple(number for number in config.dense_layers if number < layers),
        )
        part = _Part(source, frozenset(name for name in there if not name.startswith(beyond)))
        weights = load_weights(part, config, device=torch.device("cpu"), dtype=dtype, quantization=quantization)
        return _without_numbers(weights)
    # Whether a second head equals the embedding, and whether factors are positive, would be asked of numbers.
    asked = {naming.ROPE_FACTORS, *([f"{names.head}.weight"] if config.tie_word_embeddings else [])}
    outline = _Outline(source, there - asked)
    return load_weights(outline, config, device=_META, dtype=dtype, quantization=quantization)


def _enough_layers(config: ModelConfig) -> int:
    """How many first layers hold every kind: each window, and both feed-forward parts where there are two."""
    kinds = [(config.window(number), config.has_experts(number)) for number in range(config.num_layers)]
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def _without_numbers(value: Any) -> Any:
    """The same dataclasses with every tensor's data left out."""
    if isinstance(value, Tensor):
        return value.to(_META)
    if isinstance(value, tuple):
        return tuple(map(_without_numbers, value))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{field.name: _without_numbers(getattr(value, field.name)) for field in fields(value)})


class _Part:
    """A `TensorSource` of some of another's tensors."""

    def __init__(self, source: TensorSource, names: Collection[str]) -> None:
        self._source = source
        self._names = names

    @property
    def path(self) -> Path:
        return self._source.path

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> str:
        return self._source.dtype(name)

    def data(self, name: str) -> Tensor:
        return self._source.data(name)


class _Outline(_Part):
    """The same without the numbers."""

    def data(self, name: str) -> Tensor:
        return self._source.data(name).to(_META)
