"""One step on the device: forward, logits of the rows that need them, sampled tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rapid_llm.models.attention_metadata import AttentionMetadata, KVCache

from .batch import BatchBuilder, Scored
from .decode_graphs import DecodeGraphs
from .kv_memory import CacheShape
from .prompt_logprobs import score
from .request import Request
from .sampler import Choice, Drawn, RawLogprob, Sampler
from .scheduler import Chunk


class Shape(CacheShape, Protocol):
    """What the engine reads of a model's configuration."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


class Model(Protocol):
    """What the engine needs of a decoder."""

    @property
    def config(self) -> Shape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def activation_dtype(self) -> torch.dtype:
        """Of the hidden states."""
        ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the cache."""
        ...

    def forward(self, input_ids: Tensor, meta: AttentionMetadata, kv: KVCache) -> Tensor:
        """(tokens, hidden) final hidden states; writes the tokens' keys and values into `kv`."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocab) fp32 of (rows, hidden)."""
        ...

    def bindings(self) -> Iterable[tuple[str, str, Any]]: ...
    def handles(self, tokens: int) -> Iterable[Any]:
        """The row handles that a step of `tokens` tokens may call."""
        ...

    def memory(self) -> dict[str, int]: ...
    def observe(self, observer: Any) -> None: ...

    @property
    def observed(self) -> bool:
        """Whether an observer is set."""
        ...


class StepOutput(NamedTuple):
    """choices: one for each chunk that samples, in their order; where it has guesses, one more than these. scores: of
    prompts whose log-probabilities are wanted, what the chunks told of the tokens behind `request.scored`."""

    choices: list[Choice]
    scores: list[tuple[Request, list[list[RawLogprob]]]]


class Flight(NamedTuple):
    """A step that has been enqueued. drawn: None where nothing is sampled. graphed: whether another step may be
    enqueued behind it before its tokens are known."""

    chunks: Sequence[Chunk]
    scores: list[tuple[Request, list[list[RawLogprob]]]]
    drawn: Drawn | None
    graphed: bool

    def wait(self) -> StepOutput:
        """The step's results, once the device has them."""
        return StepOutput([] if self.drawn is None else self.drawn.choices(), self.scores)


class Runner:
    """Owns nothing that outlives a request but the cache, whose pages the scheduler hands out. graphs: runs decode
    steps of fixed size; None runs every step call by call."""

    def __init__(
        self, model: Model, kv: KVCache, builder: BatchBuilder, sampler: Sampler, graphs: DecodeGraphs | None = None
    ) -> None:
        self.graphs = graphs
        self._model = model
        self._kv = kv
        self._builder = builder
        self._sampler = sampler

    def run(self, chunks: Sequence[Chunk]) -> StepOutput:
        """Compute the chunks. Waits for the device."""
        return self.launch(chunks).wait()

    def launch(self, chunks: Sequence[Chunk]) -> Flight:
        """Enqueue the chunks' step."""
        if self.graphs is not None:
            reason = self.graphs.refusal(chunks)
            if reason is None:
                with torch.inference_mode():
                    logits = self.graphs.logits(chunks)
                    return Flight(chunks, [], self._sampler.draw(logits, [c.request for c in chunks]), True)
            self.graphs.report.eager[reason] += 1
        return self._launch_calls(chunks)

    def launch_behind(self, flight: Flight, chunks: Sequence[Chunk]) -> Flight:
        """Enqueue the step behind `flight`, whose tokens, still on the device, are the input of `chunks`.

        The chunks are of the same requests in the same order, and none of them was told of those tokens yet.
        """
        if self.graphs is None or flight.drawn is None:
            raise RuntimeError("a step can follow on the device only where decode steps have a fixed size")
        with torch.inference_mode():
            self.graphs.take_tokens(flight.drawn.tokens)
            logits = self.graphs.logits(chunks, ahead=True)
            return Flight(chunks, [], self._sampler.draw(logits, [c.request.ahead(1) for c in chunks]), True)

    def hidden_states(self, chunks: Sequence[Chunk]) -> Tensor:
        """(tokens, hidden) final hidden states of the chunks, in their order, with nothing sampled."""
        with torch.inference_mode():
            batch = self._builder.build(chunks)
            hidden = self._model.forward(batch.input_ids, batch.meta, self._kv)
        self._wait()
        return hidden

    def _launch_calls(self, chunks: Sequence[Chunk]) -> Flight:
        with torch.inference_mode():
            batch = self._builder.build(chunks)
            hidden = self._model.forward(batch.input_ids, batch.meta, self._kv)
            scores = [(part.request, self._score(hidden, part)) for part in batch.scores]
            if not batch.sampling:
                self._wait()
                return Flight(chunks, scores, None, False)
            rows = hidden if batch.logit_rows is None else hidden.index_select(0, batch.logit_rows)
            drawn = self._sampler.draw(self._model.compute_logits(rows), batch.sampling)
        return Flight(chunks, scores, drawn, False)

    def _score(self, hidden: Tensor, part: Scored) -> list[list[RawLogprob]]:
        rows = hidden[part.row : part.row + len(part.targets)]
        top = part.request.params.prompt_logprobs or 0
        return score(self._model.compute_logits, rows, part.targets, top=top, vocab_size=self._sampler.vocab_size)

    def _wait(self) -> None:
        """The builder's buffers may be written again only once their copies are done."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
