"""One sequence on its way through the engine.

Invariant: the cache holds keys and values of exactly `ids[:num_computed]`. That one counter serves prefill, chunks of
it, what was found in the prefix cache, the recomputation after a preemption, and guesses: what was computed for a guess
that turned out wrong lies behind it and is written over. A request decodes when one id is left to compute.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from .kv_pool import Pages

if TYPE_CHECKING:
    from .grammar import Constraint
    from .params import SamplingParams
    from .penalties import LogitEdits

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(eq=False, slots=True)
class Request:
    """request_id: unique among those in the engine. index: which of the `n` samples of its prompt it is.

    key: 64-bit seed of its random numbers. max_len: length of prompt plus answer at which it ends. stop_ids: ids that
    end it, the model's own end tokens among them unless they are to be ignored. ids: the prompt, then what was
    sampled. salt: requests share cached prefixes only with those of the same salt. cached: tokens of the prompt that
    were found in the prefix cache when it first began. scored: tokens of the prompt whose log-probability is known, the
    first one, which has none, among them. history: the drafter's copy of the ids. finish_reason: None until it ends.
    stop_reason: the stop string or the asked-for token id that ended it, None for the model's own end token; the text
    of an error.

    edits, constraint: what the sampler changes of its logits, and which tokens it may draw; None where the parameters
    ask for nothing of the kind. Both follow the output as it grows, and not one that is shortened.
    """

    request_id: str
    index: int
    prompt_len: int
    ids: list[int]
    params: SamplingParams
    key: int
    max_len: int
    stop_ids: frozenset[int] = frozenset()
    num_computed: int = 0
    pages: Pages = field(default_factory=Pages)
    preemptions: int = 0
    salt: str | None = None
    cached: int = 0
    scored: int = 1
    history: bytearray = field(default_factory=bytearray)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    edits: LogitEdits | None = None
    constraint: Constraint | None = None

    @property
    def output_len(self) -> int:
        return len(self.ids) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled."""
        return len(self.ids) - self.num_computed

    @property
    def wants_scores(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed; of `n` samples the first one does it."""
        return self.params.prompt_logprobs is not None and self.index == 0 and self.scored < self.prompt_len

    @property
    def guessable(self) -> bool:
        """Whether its next logits are the model's own, so that the tokens behind guesses can be drawn in one step."""
        return self.edits is None and self.constraint is None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def max_cached(self) -> int:
        """The most tokens it ever has in the cache: the last one sampled is never computed."""
        return self.max_len - 1

    def ahead(self, count: int) -> Request:
        """What the sampler is to see for the token behind `count` guesses: a request that has so many more of output.

        Only their number is right, not the ids, so it is for requests whose logits do not depend on their output.
        """
        other = copy(self)
        other.prompt_len -= count
        return other

    def append(self, token: int) -> None:
        """Take a sampled token and end the request where a token alone can end it: a stop id, or the length.

        The sampler does not draw a stop id within the first `min_tokens`.
        """
        self.ids.append(token)
        if token in self.stop_ids:
            self.finish_reason = "stop"
            self.stop_reason = token if token in self.params.stop_ids else None
        elif len(self.ids) >= self.max_len:
            self.finish_reason = "length"
