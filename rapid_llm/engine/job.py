"""One prompt's way from request to answer: its samples, their text, and what a reader of the stream has not seen yet.

Whoever drives the engine calls `take` and `close`; another thread may own the job. So `finished` turns true only once
everything is in place, and a stream's events cross over in a deque, whose ends are safe to use from two threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from .grammar import Constraint
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TextDelta, TokenLogprobs
from .params import SamplingParams
from .penalties import LogitEdits
from .request import Request
from .sampler import Choice, RawLogprob, request_key
from .text.detok import Detokenizer, Vocabulary

BAD_LOGITS = "the model's logits hold NaN, +inf, or nothing but -inf"
NOTHING_ALLOWED = f"{BAD_LOGITS} among the tokens that the structure allows"


class TextVocabulary(Vocabulary, Protocol):
    """The part of a tokenizer that an answer needs."""

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str: ...


class _Event(NamedTuple):
    """What one token, or the end (`token` None), added to a sample."""

    sample: int
    token: int | None
    text: str
    logprobs: TokenLogprobs | None = None


class _Sample:
    """echo: what the text begins with. fresh: whether a reader of the stream has not seen that yet."""

    __slots__ = ("detok", "echo", "fresh", "logprobs", "request")

    def __init__(self, request: Request, detok: Detokenizer, echo: str) -> None:
        self.request = request
        self.detok = detok
        self.echo = echo
        self.fresh = True
        self.logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []


class Job:
    """end_ids: the model's own end tokens. key: of the prompt's random numbers; each sample derives its own from it.

    max_len: prompt plus answer. arrival: on the engine's clock. streamed: keep events for `deltas`. vocab_size: ids
    from here on are never sampled. constraint: the beginning of the structure that the answers must have.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        vocabulary: TextVocabulary,
        end_ids: Iterable[int],
        key: int,
        max_len: int,
        arrival: float,
        streamed: bool = False,
        vocab_size: int,
        constraint: Constraint | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.failure: BaseException | None = None
        self.metrics = RequestMetrics(arrival=arrival, samples=params.n, prompt_tokens=len(prompt_ids))
        self._vocabulary = vocabulary
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(prompt_ids)
        self._events: deque[_Event] | None = deque() if streamed else None
        echo = self._echoed(params)
        stop_ids = frozenset(params.stop_ids if params.ignore_eos else (*params.stop_ids, *end_ids))
        self._samples = [
            _Sample(
                Request(
                    request_id=request_id,
                    index=index,
                    prompt_len=len(prompt_ids),
                    ids=list(prompt_ids),
                    params=params,
                    key=request_key(key, index),
                    max_len=max_len,
                    stop_ids=stop_ids,
                    edits=LogitEdits.of(params, prompt_ids, stop_ids, vocab_size),
                    constraint=None if constraint is None else constraint.copy(),
                ),
                Detokenizer.of(vocabulary, params),
                echo,
            )
            for index in range(params.n)
        ]
        self._open = params.n

    @property
    def requests(self) -> Sequence[Request]:
        return [sample.request for sample in self._samples]

    @property
    def finished(self) -> bool:
        """Whether every sample has ended and its whole text is there."""
        return self._open == 0

    @property
    def has_news(self) -> bool:
        """Whether a reader of the stream has something to do."""
        return bool(self._events) or self.finished

    def take(self, request: Request, choice: Choice, time: float) -> None:
        """Add a sampled token; the request ends here if the token, the text or the length ends it."""
        token = choice.token
        if token < 0:
            request.finish_reason, request.stop_reason = "error", _why_nothing(request)
            return
        sample = self._samples[request.index]
        request.append(token)
        if request.finish_reason == "stop":
            text = sample.detok.push_stop_token(token)
        else:
            text = sample.detok.push(token)
            if sample.detok.stop_reason is not None:
                request.finish_reason, request.stop_reason = "stop", sample.detok.stop_reason
            elif request.constraint is not None:
                self._follow(request, token)
        logprobs = None
        if sample.logprobs is not None and choice.logprobs is not None:
            logprobs = self._named(choice.logprobs)
            sample.logprobs.append(logprobs)
        if self.metrics.first_token is None:
            self.metrics.first_token = time
        self.metrics.output_tokens += 1
        self._tell(sample, token, text, logprobs)

    def take_prompt_logprobs(self, start: int, rows: Sequence[Sequence[RawLogprob]]) -> None:
        """Those of the prompt's tokens `start` (1 or more), `start` + 1, ...; each position's own token is among them.

        Positions may come in any order, and again after a preemption. Raises `IndexError` for one outside the prompt.
        """
        if self._prompt_logprobs is None:
            return
        if start < 1 or start + len(rows) > len(self._prompt_logprobs):
            raise IndexError(f"prompt positions {start} to {start + len(rows) - 1} of {len(self._prompt_logprobs)}")
        for position, row in enumerate(rows, start):
            self._prompt_logprobs[position] = self._named(row)

    def close(self, request: Request, time: float) -> None:
        """The request has ended, for whatever reason: the rest of its text comes out."""
        sample = self._samples[request.index]
        rest = sample.detok.finish()
        self.metrics.preemptions += request.preemptions
        self.metrics.cached_tokens += request.cached
        self._tell(sample, None, rest)
        if self._open == 1:
            self.metrics.finished = time
        self._open -= 1

    def deltas(self) -> list[TextDelta]:
        """What came since the last call, one delta a sample at most, in order of samples."""
        events: list[_Event] = []
        while self._events:
            events.append(self._events.popleft())
        found = []
        for sample in self._samples:
            request = sample.request
            own = [event for event in events if event.sample == request.index]
            if own:
                ended = own[-1].token is None
                found.append(
                    TextDelta(
                        "".join(event.text for event in own),
                        request.index,
                        [event.token for event in own if event.token is not None],
                        [event.logprobs for event in own if event.logprobs is not None]
                        if sample.logprobs is not None
                        else None,
                        request.finish_reason if ended else None,
                        request.stop_reason if ended else None,
                    )
                )
        return found

    def output(self) -> RequestOutput:
        """The whole answer; to be asked for once the job is finished."""
        outputs = [
            CompletionOutput(
                index=sample.request.index,
                text=sample.echo + sample.detok.text,
                token_ids=sample.request.ids[sample.request.prompt_len :],
                logprobs=sample.logprobs,
                finish_reason=sample.request.finish_reason,
                stop_reason=sample.request.stop_reason,
            )
            for sample in self._samples
        ]
        return RequestOutput(
            self.request_id, self.prompt, list(self.prompt_ids), outputs, self.metrics, self._prompt_logprobs
        )

    def _echoed(self, params: SamplingParams) -> str:
        """What the text of each answer begins with."""
        if not params.echo:
            return ""
        if self.prompt is not None:
            return self.prompt
        return self._vocabulary.decode(self.prompt_ids, skip_special_tokens=params.skip_special_tokens)

    def _follow(self, request: Request, token: int) -> None:
        """A structure that is whole ends the request, even where the length does so too: the answer is not cut.

        Where `min_tokens` forbids the end tokens, it ends here too if they are all that may follow.
        """
        constraint = request.constraint
        if constraint is None:
            return
        constraint.advance(token)
        early = request.output_len < request.params.min_tokens
        whole = constraint.complete or (early and not constraint.may_go_on())
        if constraint.error is not None:
            request.finish_reason, request.stop_reason = "error", constraint.error
        elif whole:
            request.finish_reason, request.stop_reason = "stop", None

    def _tell(self, sample: _Sample, token: int | None, text: str, logprobs: TokenLogprobs | None = None) -> None:
        if self._events is not None:
            if sample.fresh:
                text, sample.fresh = sample.echo + text, False
            self._events.append(_Event(sample.request.index, token, text, logprobs))

    def _named(self, found: Sequence[RawLogprob]) -> TokenLogprobs:
        return {entry.token: Logprob(entry.logprob, entry.rank, self._spell(entry.token)) for entry in found}

    def _spell(self, token: int) -> str:
        return self._vocabulary.decode([token], skip_special_tokens=False)


def _why_nothing(request: Request) -> str:
    """Why no token could be drawn."""
    if request.constraint is None:
        return BAD_LOGITS
    return request.constraint.error or NOTHING_ALLOWED
