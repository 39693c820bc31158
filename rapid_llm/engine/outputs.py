"""What users get back. Plain data; torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from .request import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log of a token's probability under the model's own logits, before temperature, filters and penalties.

    rank: 1 for the most probable token. decoded_token: the token's text alone.
    """

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobs = dict[int, Logprob]
"""At one position: the sampled token's and the most probable ones', by id."""


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the engine's clock, and counts. first_token, finished: None until then.

    samples: `n`. prompt_tokens: of the prompt. output_tokens: over all `n` samples. preemptions: how often a sample
    had to give up its cache and compute it again. cached_tokens: of the prompt, over all samples, that were found in
    the prefix cache instead of computed.
    """

    arrival: float
    samples: int = 1
    first_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    cached_tokens: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens after each sample's first, over the time since the first; None where there are none."""
        later = self.output_tokens - self.samples
        if later <= 0 or self.first_token is None or self.finished is None or self.finished <= self.first_token:
            return None
        return later / (self.finished - self.first_token)


@dataclass(slots=True)
class CompletionOutput:
    """One answer. token_ids: all that were sampled, the one that ended it included; text leaves that one out, and with
    `echo` begins with the prompt's.

    finish_reason: None while it runs; `stop`, `length`, `abort`, `error`. stop_reason: the stop string or the stop
    token's id; None for the model's own end of text; the text of an error. logprobs: one entry per token if asked
    for.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt's answers, `outputs[i]` being sample i of `n`. prompt: the text given, None if ids were given.

    prompt_logprobs: if asked for, one entry per token of the prompt, the first of them None: nothing comes before it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


class TextDelta(str):
    """What one step added to an answer: the text itself, with what else is known about it.

    sample_index: which of the `n` samples. token_ids: the ids behind it. The text can lag behind the ids: part of a
    character, or of a possible stop string, is held back until it is decided. finish_reason and stop_reason are set
    on a sample's last delta.
    """

    __slots__ = ("finish_reason", "logprobs", "sample_index", "stop_reason", "token_ids")

    sample_index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None

    def __new__(
        cls,
        text: str,
        sample_index: int = 0,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> TextDelta:
        self = super().__new__(cls, text)
        self.sample_index = sample_index
        self.token_ids = [] if token_ids is None else token_ids
        self.logprobs = logprobs
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        return self

    @property
    def text(self) -> str:
        """The same as the delta itself, as a plain `str`."""
        return str.__str__(self)
