"""An engine for a shape without a file: random weights made on the device, and a tokenizer that was never trained.

What such a model costs is what the real one costs; what it says is noise. For benchmarks and load tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import Decoder, activation_dtype
from rapid_llm.models.parallel import Ranks, Shard, check
from rapid_llm.models.random_weights import random_weights
from rapid_llm.models.shapes import shape_config

from .llm import LLM
from .loading import bind, resolve_device
from .options import EngineOptions
from .text.tokenizer import Tokenizer, byte_symbols

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Roles in plain text: no training gave a meaning to control tokens."""

LEAST_VOCABULARY: Final = 260


@dataclass(frozen=True, slots=True)
class ShapeRecipe:
    """How ranks make a model of random weights; see `parallel.Recipe`. Each makes the whole, and keeps its part."""

    shape: str | ModelConfig
    weights_seed: int = 0

    @property
    def config(self) -> ModelConfig:
        """Of the whole model."""
        return shape_config(self.shape) if isinstance(self.shape, str) else self.shape

    def check(self, options: EngineOptions) -> None:
        """Raise `ParallelError` for a shape that does not divide."""
        check(self.config, options.tensor_parallel)

    def __call__(self, options: EngineOptions, device: torch.device, ranks: Ranks | None) -> tuple[Decoder, Tokenizer]:
        """The decoder of one of `ranks`, or of the whole model, and a tokenizer."""
        config = self.config
        if options.load_format != "auto":
            raise ValueError(f"load_format={options.load_format!r}: nothing is loaded for a shape; leave it out")
        tokenizer = synthetic_tokenizer(config)
        dtype = activation_dtype(options.dtype, device)
        weights = random_weights(config, device, dtype, self.weights_seed, quantization=options.quantization)
        if ranks is not None:
            shard = Shard(config, ranks.index, ranks.count)
            config, weights = shard.config, shard.weights(weights)
        return bind(config, weights, options, device, ranks), tokenizer


def random_llm(shape: str | ModelConfig, *, weights_seed: int = 0, **options: Any) -> LLM:
    """An engine around random weights of a named shape (`models.shapes`) or a configuration of your own.

    options: as in `LLM`. weights_seed: equal seeds give equal weights on one kind of device, for one dtype. Raises
    `UnknownModelError` for a name that is no shape's, and `ValueError` as `LLM` does.
    """
    return LLM.from_recipe(ShapeRecipe(shape, weights_seed), **options)


def random_parts(shape: str | ModelConfig, options: EngineOptions, weights_seed: int = 0) -> tuple[Decoder, Tokenizer]:
    """The two parts of such an engine in one process; see `LLM.from_parts`."""
    return ShapeRecipe(shape, weights_seed)(options, resolve_device(options.device), None)


def synthetic_tokenizer(config: ModelConfig) -> Tokenizer:
    """Text to its UTF-8 bytes, one token each; the ids that are left over are words, so that any answer is text.

    The configuration's special ids are control tokens. Raises `ValueError` for a vocabulary without room for all bytes.
    """
    count = config.vocab_size
    if count < LEAST_VOCABULARY:
        raise ValueError(f"vocab_size={count}: a synthetic tokenizer needs {LEAST_VOCABULARY} ids or more, a byte each")
    ends = [i for i in config.eos_token_ids if i < count]
    begin = [] if config.bos_token_id is None or config.bos_token_id in ends else [config.bos_token_id]
    tokens: list[str] = [""] * count
    for number, token in enumerate(ends):
        tokens[token] = f"<|end{number or ''}|>"
    for token in begin:
        tokens[token] = "<|begin|>"
    control = {*begin, *ends}
    free = [i for i in range(count) if i not in control]
    symbols = [symbol for symbol, _ in sorted(byte_symbols().items(), key=lambda item: item[1])]
    for token, symbol in zip(free, symbols, strict=False):
        tokens[token] = symbol
    space = symbols[0x20]
    for number, token in enumerate(free[len(symbols) :]):
        tokens[token] = space + _word(number)
    backend = tokenizers.Tokenizer(models.BPE({tokens[i]: i for i in free[: len(symbols)]}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return Tokenizer(
        backend,
        tokens,
        control,
        bos_id=config.bos_token_id,
        eos_id=min(ends, default=None),
        end_ids=ends,
        chat_template=CHAT_TEMPLATE,
    )


def _word(number: int) -> str:
    """Numbers to letters: a, b, ..., z, aa, ab, ..."""
    letters = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        letters = chr(ord("a") + digit) + letters
    return letters
