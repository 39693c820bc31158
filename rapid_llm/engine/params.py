"""How one request is to be sampled: `SamplingParams`, the only place where its fields are checked.

The Python API and every server build their requests from this class, so a value is accepted, refused or normalised in
the same way whichever door it came through, and its defaults exist once. A field that the engine does not carry out yet
is refused when it is set to anything but its neutral value: it is never accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Final, cast

GREEDY_BELOW: Final = 1e-5
"""Temperatures under this are greedy: dividing fp32 logits by them would only overflow."""

MAX_TEMPERATURE: Final = 100.0
MAX_N: Final = 128
MAX_LOGPROBS: Final = 20
INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1

_NOT_YET: Final = (
    "prompt_logprobs",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
"""Fields that are part of the interface but that this version's engine does not carry out."""


class ParameterError(ValueError):
    """A sampling parameter that is not accepted. `field` is its name; the text holds the value and what is accepted."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        super().__init__(f"{field}={shown} is not accepted; use {accepted}")
        self.field = field


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
    stop: a string or several that end the text when they appear in it. Held as a tuple.
    stop_token_ids: token ids that end the sequence, beside the model's own end tokens. Held as a tuple.
    include_stop_str_in_output: leave the stop string, or the text of the stop token, in the text.
    ignore_eos: the model's own end tokens do not end the sequence.
    seed: makes this request's draws repeatable whatever else runs beside it; None draws from the engine's generator.
    logprobs: report the log-probabilities of the k most probable tokens and of the chosen one, 0 to 20, of the raw
        distribution (before temperature and truncation); None reports nothing.
    skip_special_tokens: leave control tokens such as `<|im_end|>` out of the text.
    prompt_logprobs, repetition_penalty, presence_penalty, frequency_penalty, logit_bias: not carried out in this
        version; only their neutral values are accepted.

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
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True

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
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _token_ids(self.stop_token_ids))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, getattr(self, name), "True or False")
        self._int("seed", -INT64_MAX - 1, INT64_MAX, "None means unseeded", optional=True)
        self._int("logprobs", 0, MAX_LOGPROBS, "None means none", optional=True)
        self._check_not_yet()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is held after the check."""
        return cast(tuple[str, ...], self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as it is held after the check."""
        return cast(tuple[int, ...], self.stop_token_ids)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken, so that no random number is drawn."""
        return self.temperature < GREEDY_BELOW or self.top_p == 0.0

    def check_vocab(self, vocab_size: int) -> None:
        """Raise `ParameterError` where a token id lies outside a vocabulary of `vocab_size` tokens."""
        for token in self.stop_ids:
            if token >= vocab_size:
                raise ParameterError("stop_token_ids", token, f"token ids from 0 to {vocab_size - 1}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _int(self, name: str, low: int, high: int, note: str = "", *, optional: bool = False) -> None:
        value: Any = getattr(self, name)
        if value is None and optional:
            return
        # bool is an int to Python: True as a count is a mistake of the caller's, not a 1
        is_int = isinstance(value, Integral) and not isinstance(value, bool)
        if not is_int or not low <= value <= high:
            raise ParameterError(name, value, _range("an integer", low, high, note))
        self._set(name, int(value))

    def _float(self, name: str, low: float, high: float, note: str = "") -> None:
        value: Any = getattr(self, name)
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        # written so that NaN, which fails every comparison, is refused
        if not is_number or not low <= value <= high:
            raise ParameterError(name, value, _range("a finite number", low, high, note))
        self._set(name, float(value))

    def _check_not_yet(self) -> None:
        neutral = {f.name: f.default for f in fields(self)}
        for name in _NOT_YET:
            value, default = getattr(self, name), neutral[name]
            if default is None:
                is_neutral = value is None or (isinstance(value, Mapping) and not value)
            else:
                is_neutral = not isinstance(value, bool) and isinstance(value, Real) and value == default
            if not is_neutral:
                raise ParameterError(name, value, f"{default}: this version's engine does not carry out {name}")
            self._set(name, default)


def _range(kind: str, low: float, high: float, note: str) -> str:
    shown = [str(int(bound)) if bound == int(bound) else str(bound) for bound in (low, high)]
    return f"{kind} from {shown[0]} to {shown[1]}" + (f" ({note})" if note else "")


def _stop_strings(value: Any) -> tuple[str, ...]:
    accepted = "a non-empty string or a list of them"
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else _tuple("stop", value, accepted)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ParameterError("stop", value, accepted)
        if not string.isascii() and any("\ud800" <= c <= "\udfff" for c in string):
            raise ParameterError("stop", value, "text without lone surrogates, which no model output contains")
    return tuple(dict.fromkeys(strings))


def _token_ids(value: Any) -> tuple[int, ...]:
    accepted = f"a list of token ids, integers from 0 to {INT32_MAX}"
    if value is None:
        return ()
    ids = _tuple("stop_token_ids", value, accepted)
    for token in ids:
        is_id = isinstance(token, Integral) and not isinstance(token, bool)
        if not is_id or not 0 <= token <= INT32_MAX:
            raise ParameterError("stop_token_ids", value, accepted)
    return tuple(dict.fromkeys(int(token) for token in ids))


def _tuple(name: str, value: Any, accepted: str) -> tuple[Any, ...]:
    """`value` as a tuple; a mapping, a number or bytes is not a list, however iterable it may be."""
    if isinstance(value, Mapping | bytes | bytearray | str) or not isinstance(value, Iterable):
        raise ParameterError(name, value, accepted)
    return tuple(value)
