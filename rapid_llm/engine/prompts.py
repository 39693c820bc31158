"""From what users pass as prompts to checked token ids: whatever is wrong with one is found before any runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import NamedTuple, Protocol

from .params import SamplingParams

TokenIds = Sequence[int]
Prompt = str | TokenIds


class PromptTokenizer(Protocol):
    """The part of a tokenizer that reads prompts."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def check_ids(self, ids: Iterable[int], what: str = "prompt") -> list[int]: ...


class ParsedPrompt(NamedTuple):
    """text: as given, None for a prompt of ids."""

    text: str | None
    ids: list[int]


def parse_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: PromptTokenizer) -> list[ParsedPrompt]:
    """One prompt (text, or a list of ids) or a list of them.

    Raises `ValueError` for an empty prompt, an empty list, and ids outside the vocabulary; `TypeError` for other
    things.
    """
    if _is_one(prompts):
        return [_parse(prompts, tokenizer, "prompt")]  # type: ignore[arg-type]
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts must be text, a list of token ids, or a list of either, not {type(prompts).__name__}")
    if not prompts:
        raise ValueError("prompts is an empty list: give at least one prompt, of at least one token")
    return [_parse(prompt, tokenizer, f"prompt {i}") for i, prompt in enumerate(prompts)]  # type: ignore[arg-type]


def parse_prompt(prompt: Prompt, tokenizer: PromptTokenizer) -> ParsedPrompt:
    """Exactly one prompt; a list of prompts is a `TypeError`."""
    if not _is_one(prompt):
        raise TypeError("one prompt is wanted here, text or a list of token ids; generate() takes several")
    return _parse(prompt, tokenizer, "prompt")


def params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters of each of `count` prompts: the same ones, one for each, or the defaults."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise TypeError(f"sampling_params must be a SamplingParams or a list of them, not {params!r:.80}")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params were given for {count} prompts; give one, or one for each")
    return list(params)


def check_salt(salt: object) -> None:
    """Raise `ValueError` for a cache_salt that is neither None nor a string of at least one character."""
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"cache_salt={salt!r:.80}: use None, or a string of at least one character")


def check_length(what: str, length: int, max_model_len: int) -> None:
    """Raise `ValueError`, with both numbers, for a prompt that leaves no room for an answer."""
    if length >= max_model_len:
        raise ValueError(
            f"{what} has {length} tokens and the context {max_model_len}, of which the answer needs at least one: "
            "shorten the prompt, or raise max_model_len if the model allows it"
        )


def _is_one(prompts: object) -> bool:
    if isinstance(prompts, str):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and not isinstance(prompts[0], str | Sequence)


def _parse(prompt: Prompt, tokenizer: PromptTokenizer, what: str) -> ParsedPrompt:
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{what} is empty; give at least one token")
        ids = tokenizer.encode(prompt)
        if not ids:
            raise ValueError(f"{what} {prompt!r:.40} holds nothing that this model has a token for")
        return ParsedPrompt(prompt, ids)
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)
    if not listed or not all(isinstance(token, Integral) for token in prompt):
        raise TypeError(f"{what} must be text or a list of token ids, not {prompt!r:.80}")
    if not prompt:
        raise ValueError(f"{what} is empty; give at least one token")
    return ParsedPrompt(None, tokenizer.check_ids(prompt, what))
