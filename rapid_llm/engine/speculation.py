"""Guesses at the next tokens of a request, taken from its own history. Torch-free.

A guess costs nothing but the tokens of the step that verifies it: the model computes the guessed tokens behind the
last one, and each is kept only if it is the token that plain decoding draws there. So guesses decide when tokens come,
never which.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from .request import Request

METHODS: Final = ("ngram",)
MAX_TOKENS: Final = 32
MAX_NGRAM: Final = 16
_ITEM: Final = array("i").itemsize


@dataclass(frozen=True, slots=True)
class Speculation:
    """How to guess.

    method: `ngram`, the only one: what followed the latest earlier occurrence of the last few tokens. num_tokens: most
    tokens of a guess. max_ngram, min_ngram: so many last tokens are looked for, the most first.

    Raises `ValueError` naming the field and what is accepted.
    """

    method: str = "ngram"
    num_tokens: int = 4
    max_ngram: int = 4
    min_ngram: int = 2

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"speculative method={self.method!r} is not known; use {', '.join(METHODS)}")
        for name, most in (("num_tokens", MAX_TOKENS), ("max_ngram", MAX_NGRAM), ("min_ngram", MAX_NGRAM)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"speculative {name}={value!r}: use an integer from 1 to {most}")
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"speculative min_ngram={self.min_ngram} exceeds max_ngram={self.max_ngram}: lower the first or raise "
                "the second"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Speculation:
        """From keywords, `method` among them; an unknown one is a `ValueError` that lists the known ones."""
        if not isinstance(given, Mapping):
            raise ValueError(f"speculative={given!r}: use a mapping such as {{'method': 'ngram', 'num_tokens': 4}}")
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"speculative has no {name!r}; known: {', '.join(known)}")
        if "method" not in given:
            raise ValueError(f"speculative needs a method; known: {', '.join(METHODS)}")
        return cls(**given)


class NgramDrafter:
    """Looks for the end of a history earlier in the same history. What it remembers lies in the request itself."""

    def __init__(self, how: Speculation) -> None:
        self.how = how

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow `request.ids`; none where nothing like their end came before."""
        history, ids = request.history, request.ids
        history += array("i", ids[len(history) // _ITEM :]).tobytes()
        most = min(most, self.how.num_tokens)
        if most < 1:
            return ()
        for size in range(min(self.how.max_ngram, len(ids) - 1), self.how.min_ngram - 1, -1):
            start = _find(history, size)
            if start is not None:
                first = start + size
                period = len(ids) - first  # past the end the guess goes on as if the same came round again
                return tuple(ids[first + i % period] for i in range(most))
        return ()


def _find(history: bytearray, size: int) -> int | None:
    """The token index at which the last `size` tokens occur for the last time before their own place."""
    pattern = history[-size * _ITEM :]
    end = len(history) - 1  # any occurrence but the last one ends before the last byte
    while True:
        at = history.rfind(pattern, 0, end)
        if at < 0:
            return None
        if at % _ITEM == 0:
            return at // _ITEM
        end = at + len(pattern) - 1
