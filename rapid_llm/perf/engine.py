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
    """An engine, and what its steps need of each device. config: of the whole model. vocab: ids that prompts may hold.
    dtype: torch's, of activations. left_out: cases that do not fit, with the reason."""

    llm: Any
    config: ModelConfig
    needs: StepNeeds
    vocab: int
    dtype: Any
    left_out: dict[Case, str] = field(default_factory=dict)


def build(
    shape: str | ModelConfig | None, model: str | None, options: Mapping[str, Any], cases: Sequence[Case]
) -> Built:
    """An engine of random weights of `shape`, or of the file or folder `model`.

    options: of `EngineOptions`. A cache of default size is made as large as the cases need. Raises `ValueError` for a
    case longer than the model's context, `TooLargeError` where nothing fits.
    """
    from rapid_llm.engine.kv_memory import bytes_per_token, cache_dtype
    from rapid_llm.engine.llm import LLM
    from rapid_llm.engine.loading import resolve_device
    from rapid_llm.models.decoder import activation_dtype

    largest = max((case.batch for case in cases), default=1)
    device = resolve_device(str(options.get("device", "auto")))
    given = {"max_running": largest, **options}
    if largest * PAGE_SIZE > BATCH_TOKENS[device.type]:  # the last page of every prompt is computed in one step
        given.setdefault("max_batch_tokens", largest * PAGE_SIZE)
    checked = EngineOptions.of(given)
    recipe, config = _recipe(shape, model, checked)
    _check_context(config.max_model_len, checked.max_model_len, cases)
    dtype, ranks = activation_dtype(checked.dtype, device), checked.tensor_parallel
    if shape is not None:
        _check_weights(config, checked, device)
    token_bytes = bytes_per_token(config, cache_dtype(checked.kv_cache_dtype) or dtype) // ranks
    parts = recipe(checked, device, None) if ranks == 1 else None
    room = _room(checked, config if shape is not None else None, device, token_bytes, loaded=parts is not None)
    left_out = _left_out(cases, token_bytes, room)
    if checked.kv_cache_tokens is None:
        given["kv_cache_tokens"] = max((c.cache_tokens for c in cases if c not in left_out), default=PAGE_SIZE)
    llm = LLM.from_recipe(recipe, **given) if parts is None else LLM.from_parts(*parts, **given)
    decoder: Any = llm._decoder  # of the first rank
    kv_bytes = llm.explain().memory["kv_cache"] / llm.kv_cache_tokens
    needs = StepNeeds(config, decoder.weight_bytes, kv_bytes, config.hidden_size * dtype.itemsize, ranks)
    return Built(llm, config, needs, min(llm.tokenizer.vocab_size, config.vocab_size), dtype, left_out)


def _recipe(shape: str | ModelConfig | None, model: str | None, options: EngineOptions) -> tuple[Any, ModelConfig]:
    """What makes the model, and its configuration."""
    from rapid_llm.engine.loading import FileRecipe, read_config
    from rapid_llm.engine.random_llm import ShapeRecipe
    from rapid_llm.models.hub import DEFAULT_MODEL, resolve_model
    from rapid_llm.models.opening import open_source

    if shape is not None:
        made = ShapeRecipe(shape)
        return made, made.config
    name = model or DEFAULT_MODEL
    path = resolve_model(name, load_format=options.load_format)
    return FileRecipe(name), read_config(open_source(path, load_format=options.load_format))


def _room(
    options: EngineOptions, shape: ModelConfig | None, device: Any, token_bytes: int, *, loaded: bool
) -> int | None:
    """Bytes that the cache of one device may take; None where that is not known. shape: of the weights that are still
    to be made, if they are not `loaded`."""
    from rapid_llm.engine.kv_memory import free_memory

    if options.kv_cache_tokens is not None:
        return options.kv_cache_tokens * token_bytes
    free = free_memory(device)
    if free is None or (not loaded and shape is None):
        return None
    if not loaded and shape is not None:
        free -= _weight_bytes(shape, options, device)
    return int(free * MEMORY_SHARE)


def _left_out(cases: Sequence[Case], token_bytes: int, room: int | None) -> dict[Case, str]:
    """Cases whose cache has no room; raises `TooLargeError` where that is all of them."""
    found = {
        case: f"needs {case.cache_tokens * token_bytes / 1e9:.1f} GB of key/value cache; {room / 1e9:.1f} GB are there"
        for case in cases
        if room is not None and case.cache_tokens * token_bytes > room
    }
    if cases and len(found) == len(cases):
        raise TooLargeError("; ".join(f"{case.title} {reason}" for case, reason in found.items()))
    return found


def _check_context(trained: int, asked: int | None, cases: Sequence[Case]) -> None:
    limit = min(trained, asked or trained)
    for case in cases:
        if case.length > limit:
            raise ValueError(
                f"{case.title}: a sequence has {case.length} tokens at its end, and the context is {limit}: lower "
                "--context, --prefill or --decode"
            )


def _check_weights(config: ModelConfig, options: EngineOptions, device: Any) -> None:
    """Before anything is made: a process that outgrows its memory is killed without a word."""
    from rapid_llm.engine.kv_memory import free_memory

    free, needed = free_memory(device), _weight_bytes(config, options, device)
    if free is not None and needed > free:
        raise TooLargeError(
            f"{config.name}: the weights take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free on {device}; use "
            "a smaller shape, --dtype bfloat16, or --quantization"
        )


def _weight_bytes(config: ModelConfig, options: EngineOptions, device: Any) -> int:
    """Of random weights; each rank makes the whole of them before it keeps its part."""
    from rapid_llm.models.decoder import activation_dtype
    from rapid_llm.models.random_weights import weight_bytes

    return weight_bytes(config, activation_dtype(options.dtype, device), quantization=options.quantization)
