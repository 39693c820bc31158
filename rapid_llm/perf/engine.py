"""The engine of a benchmark: built for the largest of its cases, those left out that do not fit this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rapid_llm.bench.errors import BenchError
from rapid_llm.engine.options import BATCH_TOKENS, PAGE_SIZE, EngineOptions

from .cases import Case
from .needs import StepNeeds

if TYPE_CHECKING:
    from rapid_llm.models.config import ModelConfig

MEMORY_SHARE: Final = 0.85
"""Of what is free once the weights are there, the most that the cache takes: steps need memory too."""


class TooLargeError(BenchError):
    """The weights, or the cache of every case, do not fit this machine's memory."""

    code = "too_large"


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, and what of a case it can run. left_out: cases that do not fit, with the reason. source: the shape or
    the file."""

    llm: Any
    config: ModelConfig
    needs: StepNeeds
    left_out: dict[Case, str] = field(default_factory=dict)


def build(
    shape: str | ModelConfig | None, model: str | None, options: Mapping[str, Any], cases: Sequence[Case]
) -> Built:
    """An engine of random weights of `shape`, or of the file or folder `model`.

    options: of `EngineOptions`. A cache of default size is made as large as the cases need. Raises `ValueError` for a
    case longer than the model's context, `TooLargeError` where nothing fits.
    """
    import torch

    from rapid_llm.engine.kv_memory import bytes_per_token, free_memory
    from rapid_llm.engine.llm import LLM
    from rapid_llm.engine.loading import load, resolve_device
    from rapid_llm.engine.random_llm import random_parts

    largest = max((case.batch for case in cases), default=1)
    device = resolve_device(str(options.get("device", "auto")))
    given = {"max_running": largest, **options}
    if largest * PAGE_SIZE > BATCH_TOKENS[device.type]:  # the last page of every prompt is computed in one step
        given.setdefault("max_batch_tokens", largest * PAGE_SIZE)
    checked = EngineOptions.of(given)
    if shape is not None:
        config = _config(shape)
        _check_context(config.max_model_len, checked.max_model_len, cases)
        _check_weights(config, checked, device)
        decoder, tokenizer = random_parts(config, checked)
    else:
        decoder, tokenizer = load(model or _default_model(), checked, device)
        _check_context(decoder.config.max_model_len, checked.max_model_len, cases)
    config = decoder.config
    token_bytes = bytes_per_token(config, getattr(decoder, "kv_dtype", decoder.activation_dtype))
    free = free_memory(device)
    room = None if free is None else int(free * MEMORY_SHARE)
    if checked.kv_cache_tokens is not None:
        room = checked.kv_cache_tokens * token_bytes
    left_out = {
        case: f"needs {case.cache_tokens * token_bytes / 1e9:.1f} GB of key/value cache; {room / 1e9:.1f} GB are there"
        for case in cases
        if room is not None and case.cache_tokens * token_bytes > room
    }
    fitting = [case for case in cases if case not in left_out]
    if cases and not fitting:
        raise TooLargeError("; ".join(f"{case.title} {reason}" for case, reason in left_out.items()))
    if checked.kv_cache_tokens is None and fitting:
        given["kv_cache_tokens"] = max(case.cache_tokens for case in fitting)
    llm = LLM.from_parts(decoder, tokenizer, **given)
    row = config.hidden_size * torch.empty((), dtype=decoder.activation_dtype).element_size()
    kv_bytes = llm.explain().memory["kv_cache"] / llm.kv_cache_tokens
    return Built(llm, config, StepNeeds(config, decoder.weight_bytes, kv_bytes, row), left_out)


def _config(shape: str | ModelConfig) -> ModelConfig:
    from rapid_llm.models.shapes import shape_config

    return shape_config(shape) if isinstance(shape, str) else shape


def _default_model() -> str:
    from rapid_llm.models.hub import DEFAULT_MODEL

    return DEFAULT_MODEL


def _check_context(trained: int, asked: int | None, cases: Sequence[Case]) -> None:
    limit = min(trained, asked or trained)
    for case in cases:
        if case.length > limit:
            raise ValueError(
                f"{case.title}: a sequence has {case.length} tokens at its end, and the context is {limit}: lower "
                "--context, --prefill or --decode"
            )


def _check_weights(config: ModelConfig, options: Any, device: Any) -> None:
    """Before anything is made: a process that outgrows its memory is killed without a word."""
    from rapid_llm.engine.kv_memory import free_memory
    from rapid_llm.models.decoder import activation_dtype
    from rapid_llm.models.random_weights import weight_bytes

    free = free_memory(device)
    needed = weight_bytes(config, activation_dtype(options.dtype, device), quantization=options.quantization)
    if free is not None and needed > free:
        raise TooLargeError(
            f"{config.name}: the weights take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free on {device}; use "
            "a smaller shape, --dtype bfloat16, or --quantization"
        )
