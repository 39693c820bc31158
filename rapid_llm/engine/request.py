"""One sequence on its way through the engine.

Invariant: the cache holds keys and values of exactly `ids[:num_computed]`. That one counter serves prefill, chunks of
it, and the recomputation after a preemption; a request decodes when one id is left to compute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from .kv_pool import Pages

if TYPE_CHECKING:
    from .params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(eq=False, slots=True)
class Request:
    """request_id: unique among those in the engine. index: which of the `n` samples of its prompt it is.

    key: 64-bit seed of its random numbers. max_len: length of prompt plus answer at which it ends. stop_ids: ids that
    end it, the model's own end tokens among them unless they are to be ignored. ids: the prompt, then what was
    sampled. finish_reason: None until it ends. stop_reason: the stop string or the asked-for token id that ended it,
    None for the model's own end token; the text of an error.
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
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def output_len(self) -> int:
        return len(self.ids) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled."""
        return len(self.ids) - self.num_computed

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def max_cached(self) -> int:
        """The most tokens it ever has in the cache: the last one sampled is never computed."""
        return self.max_len - 1

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
