"""How one request is to be sampled: `SamplingParams`, the only place where its fields are checked.

The Python API and every server build their requests from this class, so a value is accepted, refused or normalised in
the same way whichever door it came through, and its defaults exist once. No field is accepted and ignored. What the
fields mean together, and in which order they apply, is written in docs/sampling.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, cast

from .checks import INT32_MAX, INT64_MAX, ParameterError, biases, flag, integer, number, strings, token_ids
from .structured import StructuredOutput

__all__ = ["ParameterError", "SamplingParams", "StructuredOutput"]

GREEDY_BELOW: Final = 1e-5
"""Temperatures under this are greedy: dividing fp32 logits by them would only overflow."""

MAX_TEMPERATURE: Final = 100.0
MAX_N: Final = 128
MAX_LOGPROBS: Final = 20
MAX_STOPS: Final = 64
"""Stop strings: each is followed through every character of the text."""

MAX_BIASES: Final = 1024
MAX_BIAS: Final = 100.0

_OTHER_NAMES: Final = {"max_completion_tokens": "max_tokens"}
"""Names under which requests may bring a field."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling of one request; immutable, hashable, checked when made.

    n: sequences to generate for the prompt, 1 to 128.
    temperature: 0 to 100; 0 (or less than 1e-5) is greedy.
    top_k: keep the k most probable tokens; -1 and 0 switch it off.
    top_p: keep the smallest set of most probable tokens whose mass reaches this, 0 to 1; 0 is greedy, 1 is off.
    min_p: drop tokens less probable than this times the most probable one, 0 to 1; 0 is off.
    max_tokens: at most this many tokens; None means until the context is full.
    min_tokens: neither an end token nor a stop string ends the sequence within its first `min_tokens` tokens.
    stop: a string or several, at most 64, that end the text when they appear in it. Held as a tuple.
    stop_token_ids: token ids that end the sequence, beside the model's own end tokens. Held as a tuple.
    include_stop_str_in_output: leave the stop string, or the text of the stop token, in the text.
    ignore_eos: the model's own end tokens do not end the sequence.
    seed: makes this request's draws repeatable whatever else runs beside it; None draws from the engine's generator.
    logprobs: report the log-probabilities of the k most probable tokens and of the chosen one, 0 to 20, of the raw
        distribution (before penalties, masks, temperature and truncation); None reports nothing.
    prompt_logprobs: the same of each token of the prompt but the first, in `RequestOutput.prompt_logprobs`.
    repetition_penalty: divides the positive logits of tokens in the prompt or the output, and multiplies the others,
        0.01 to 100; 1 is off.
    presence_penalty: taken from the logits of tokens in the output, -2 to 2; 0 is off.
    frequency_penalty: the same for each time that the token is in the output, -2 to 2; 0 is off.
    logit_bias: added to the logits of tokens, by id, -100 to 100 each, at most 1024. Held as a tuple of pairs.
    skip_special_tokens: leave control tokens such as `<|im_end|>` out of the text.
    structured: what the answer must look like, as a `StructuredOutput` or a mapping of its fields.
    echo: the text begins with the prompt's. Token ids and log-probabilities remain those of the answer.

    Raises `ParameterError` (a `ValueError`) naming the field, the value and what is accepted.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None
    skip_special_tokens: bool = True
    structured: StructuredOutput | Mapping[str, Any] | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        self._int("n", 1, MAX_N)
        self._float("temperature", 0.0, MAX_TEMPERATURE, "0 is greedy")
        self._int("top_k", -1, INT32_MAX, "-1 and 0 are off")
        self._float("top_p", 0.0, 1.0, "0 is greedy, 1 is off")
        self._float("min_p", 0.0, 1.0, "0 is off")
        self._int("max_tokens", 1, INT32_MAX, "None means until the context is full", optional=True)
        self._int("min_tokens", 0, INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        self._set("stop", () if self.stop is None else strings("stop", self.stop, MAX_STOPS))
        self._set("stop_token_ids", () if self.stop_token_ids is None else self._ids())
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "echo"):
            flag(name, getattr(self, name))
        self._int("seed", -INT64_MAX - 1, INT64_MAX, "None means unseeded", optional=True)
        self._int("logprobs", 0, MAX_LOGPROBS, "None means none", optional=True)
        self._int("prompt_logprobs", 0, MAX_LOGPROBS, "None means none", optional=True)
        self._float("repetition_penalty", 0.01, 100.0, "1 is off")
        self._float("presence_penalty", -2.0, 2.0, "0 is off")
        self._float("frequency_penalty", -2.0, 2.0, "0 is off")
        given = () if self.logit_bias is None else self.logit_bias
        self._set("logit_bias", biases("logit_bias", given, MAX_BIASES, -MAX_BIAS, MAX_BIAS))
        if self.structured is not None:
            self._set("structured", StructuredOutput.of(self.structured))
            if self.ignore_eos:
                raise ParameterError("ignore_eos", True, "False with structured, whose end is the end of the answer")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SamplingParams:
        """Parameters from a request's fields by name; None is the same as absent.

        `max_completion_tokens` is another name of `max_tokens`. Raises `ParameterError` for a name that is none, with
        the nearest that is one, and for two names of a field with different values.
        """
        known = {f.name for f in fields(cls)}
        found: dict[str, Any] = {}
        for name, value in given.items():
            field = _OTHER_NAMES.get(name, name)
            if field not in known:
                near = difflib.get_close_matches(str(name), [*known, *_OTHER_NAMES], n=1)
                hint = f"{near[0]}" if near else f"one of {', '.join(sorted(known))}"
                raise ParameterError(str(name), value, f"a parameter that exists: {hint}")
            if value is None:
                continue
            if field in found and found[field] != value:
                raise ParameterError(name, value, f"the same value as {field}, or only one of them")
            found[field] = value
        return cls(**found)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is held after the check."""
        return cast(tuple[str, ...], self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as it is held after the check."""
        return cast(tuple[int, ...], self.stop_token_ids)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is held after the check: (token id, bias), by id."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @property
    def structure(self) -> StructuredOutput | None:
        """`structured` as it is held after the check."""
        return cast(StructuredOutput | None, self.structured)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken, so that no random number is drawn."""
        return self.temperature < GREEDY_BELOW or self.top_p == 0.0

    def check_vocab(self, vocab_size: int) -> None:
        """Raise `ParameterError` where a token id lies outside a vocabulary of `vocab_size` tokens."""
        named = (("stop_token_ids", self.stop_ids), ("logit_bias", [token for token, _ in self.biases]))
        for field, tokens in named:
            for token in tokens:
                if token >= vocab_size:
                    raise ParameterError(field, token, f"token ids from 0 to {vocab_size - 1}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _ids(self) -> tuple[int, ...]:
        return token_ids("stop_token_ids", self.stop_token_ids)

    def _int(self, name: str, low: int, high: int, note: str = "", *, optional: bool = False) -> None:
        value: Any = getattr(self, name)
        if not (value is None and optional):
            self._set(name, integer(name, value, low, high, note))

    def _float(self, name: str, low: float, high: float, note: str = "") -> None:
        self._set(name, number(name, getattr(self, name), low, high, note))
