"""From a model's name to a decoder on its device and a tokenizer."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import Final

import torch

from rapid_llm.kernels import dispatch
from rapid_llm.models import hub
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import Decoder, activation_dtype
from rapid_llm.models.errors import MetadataError
from rapid_llm.models.gguf_source import GGUFSource
from rapid_llm.models.opening import Source, open_source
from rapid_llm.models.parallel import Ranks, Shard
from rapid_llm.models.parallel import check as check_ranks
from rapid_llm.models.shards import read_json
from rapid_llm.models.weights import ModelWeights, load_weights

from . import invariance
from .clock import now
from .kv_memory import cache_dtype
from .options import PAGE_SIZE, EngineOptions
from .text.tokenizer import Tokenizer

SILENT_S: Final = 1.0
"""Loading that is over within this time shows no progress."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenModel:
    """A model whose headers are read and whose weights are not."""

    source: Source
    config: ModelConfig
    tokenizer: Tokenizer


def open_model(model: str | os.PathLike[str], *, load_format: str = "auto", fetch: bool = True) -> OpenModel:
    """Find a model (a known name, a file, a folder, a hub's id; see `hub.resolve_model`) and read what it says of
    itself.

    Raises `rapid_llm.models.errors.ModelError`s that name the file, the value and the fix.
    """
    source = open_source(hub.resolve_model(model, load_format=load_format, fetch=fetch), load_format=load_format)
    config = read_config(source)
    tokenizer = read_tokenizer(source, config)
    return OpenModel(source, complete(config, tokenizer), tokenizer)


def read_config(source: Source) -> ModelConfig:
    """The configuration of the model that `source` is of; of a folder, what its config.json says alone."""
    if isinstance(source, GGUFSource):
        return ModelConfig.from_gguf(source.file)
    path = source.path / "config.json"
    if not path.is_file():
        raise MetadataError(f"{source.path} holds weights and no config.json; fetch the whole model")
    config = ModelConfig.from_hf(read_json(path), name=str(path))
    return replace(config, name=source.path.resolve().name)


def read_tokenizer(source: Source, config: ModelConfig | None = None) -> Tokenizer:
    """The tokenizer; config: leaves out added tokens that the model has no rows for."""
    if isinstance(source, GGUFSource):
        return Tokenizer.from_gguf(source.file)
    return Tokenizer.from_folder(source.path, limit=None if config is None else config.vocab_size)


def complete(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """`config` with what a folder says of its special tokens and template in other files than config.json."""
    return replace(
        config,
        num_tokens=tokenizer.vocab_size,
        bos_token_id=tokenizer.bos_id,
        eos_token_ids=tuple(sorted(tokenizer.end_ids)),
        add_bos=tokenizer.add_bos,
        chat_template=tokenizer.chat_template,
    )


def resolve_device(name: str) -> torch.device:
    """The device for `auto`, `cpu`, `cuda`, `cuda:1`; raises `ValueError` for any other."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is not a device; use auto, cpu, cuda or cuda:<number>") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not supported; use auto, cpu, cuda or cuda:<number>")
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = 0 if device.index is None else device.index
    if index >= count:
        seen = "torch sees no CUDA device" if count == 0 else f"torch sees CUDA devices 0 to {count - 1}"
        raise ValueError(f"device={name!r}: {seen}; use device='cpu', or a number that is there")
    return torch.device("cuda", index)


@dataclass(frozen=True, slots=True)
class FileRecipe:
    """How ranks make a model that is in files; see `parallel.Recipe`."""

    model: str

    def check(self, options: EngineOptions) -> None:
        """Raise `ParallelError` for a model that does not divide; fetches it, so that not every rank does."""
        path = hub.resolve_model(self.model, load_format=options.load_format)
        check_ranks(read_config(open_source(path, load_format=options.load_format)), options.tensor_parallel)

    def __call__(self, options: EngineOptions, device: torch.device, ranks: Ranks | None) -> tuple[Decoder, Tokenizer]:
        """See `load`."""
        return load(self.model, options, device, ranks)


def load(
    model: str | os.PathLike[str], options: EngineOptions, device: torch.device, ranks: Ranks | None = None
) -> tuple[Decoder, Tokenizer]:
    """Read a model on to `device`; see `open_model`. A load that takes long says how far it is, on a terminal.

    ranks: reads the part of one of them. Raises `ModelError`s, and `ValueError` for options that the weights cannot
    honour.
    """
    opened = open_model(model, load_format=options.load_format)
    shard = None if ranks is None else Shard(opened.config, ranks.index, ranks.count)
    shows = sys.stderr.isatty() and (ranks is None or ranks.index == 0)
    weights = load_weights(
        opened.source,
        opened.config,
        device=device,
        dtype=activation_dtype(options.dtype, device),
        progress=_Progress(opened.config.name) if shows else None,
        quantization=options.quantization,
        shard=shard,
    )
    return bind(opened.config if shard is None else shard.config, weights, options, device, ranks), opened.tokenizer


def bind(
    config: ModelConfig,
    weights: ModelWeights,
    options: EngineOptions,
    device: torch.device,
    ranks: Ranks | None = None,
) -> Decoder:
    """The decoder of an engine with these options; it keeps what its rows read, so drop `weights`. ranks: as in
    `Decoder`."""
    return Decoder(
        config,
        weights,
        device=device,
        dtype=options.dtype,
        page_size=PAGE_SIZE,
        max_model_len=options.max_model_len,
        kv_dtype=cache_dtype(options.kv_cache_dtype),
        choose=invariance.choose if options.deterministic else dispatch,
        ranks=ranks,
    )


class _Progress:
    """A line on standard error, drawn over, from `SILENT_S` on."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._start = now()
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // total
        if percent == self._shown or now() - self._start < SILENT_S:
            return
        self._shown = percent
        print(
            f"\rloading {self._label}: {percent} %\x1b[K",
            end="\n" if done == total else "",
            file=sys.stderr,
            flush=True,
        )
