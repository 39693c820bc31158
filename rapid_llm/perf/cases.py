"""What is measured: the first token of a prompt, and decode steps of a batch of sequences that have a context."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rapid_llm.engine.options import PAGE_SIZE

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Case:
    """prefill: `batch` prompts of `context` tokens, up to the first token of each. decode: `tokens` steps, each of one
    token for each of `batch` sequences, behind prompts of `context` tokens."""

    kind: Kind
    batch: int
    context: int
    tokens: int = 0

    @property
    def title(self) -> str:
        if self.kind == "prefill":
            many = "" if self.batch == 1 else f"{self.batch} x "
            return f"prefill of {many}{self.context} tokens"
        return f"decode, batch {self.batch}, context {self.context}"

    @property
    def produced(self) -> int:
        """Tokens that count: of the prompts, or those that come out of the steps."""
        return self.batch * (self.context if self.kind == "prefill" else self.tokens)

    @property
    def steps(self) -> int:
        """Steps of decode; a prefill is one."""
        return max(self.tokens, 1)

    @property
    def length(self) -> int:
        """Tokens of a sequence at its end."""
        return self.context + self.tokens + 1

    @property
    def cache_tokens(self) -> int:
        """Tokens of cache, in whole pages, so that prompts stay known between rounds: a page to spare for each
        sequence, and a quarter more, since answers of earlier rounds stay known too."""
        pages = -(-self.length // PAGE_SIZE) + 1
        return (self.batch * pages * 5 // 4 + 1) * PAGE_SIZE

    def json(self) -> dict[str, Any]:
        return asdict(self)


def make_cases(
    *, prefills: Sequence[int], batches: Sequence[int], contexts: Sequence[int], tokens: int
) -> tuple[Case, ...]:
    """A case for each prompt length, then, unless `tokens` is 0, one for each batch at each context."""
    found = [Case("prefill", 1, length) for length in prefills]
    if tokens:
        found += [Case("decode", batch, context, tokens) for context, batch in itertools.product(contexts, batches)]
    return tuple(dict.fromkeys(found))


def numbers(option: str, text: str, *, none: bool = False) -> tuple[int, ...]:
    """`1,16,64` to whole numbers, each once; none: 0 alone stands for no number. Raises `ValueError` naming both."""
    found = []
    for part in text.split(","):
        try:
            value = int(part)
        except ValueError:
            value = -1
        if value < (0 if none else 1):
            raise ValueError(f"{option} {text!r}: {part.strip()!r} is not a whole number from 1 up; use 1,16,64")
        found.append(value)
    if found == [0]:
        return ()
    if 0 in found:
        raise ValueError(f"{option} {text!r}: 0 stands for none, and goes with no other number")
    return tuple(dict.fromkeys(found))
