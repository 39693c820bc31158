"""One step on the device: forward, logits of the rows that need them, sampled tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rapid_llm.models.attention_metadata import AttentionMetadata, KVCache

from .batch import BatchBuilder, Scored
from .kv_memory import CacheShape
from .prompt_logprobs import score
from .request import Request
from .sampler import Choice, RawLogprob, Sampler
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
        """Of the hidden states and of the cache."""
        ...

    def forward(self, input_ids: Tensor, meta: AttentionMetadata, kv: KVCache) -> Tensor:
        """(tokens, hidden) final hidden states; writes the tokens' keys and values into `kv`."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocab) fp32 of (rows, hidden)."""
        ...

    def bindings(self) -> Iterable[tuple[str, str, Any]]: ...
    def memory(self) -> dict[str, int]: ...
    def observe(self, observer: Any) -> None: ...


class StepOutput(NamedTuple):
    """choices: one for each chunk that samples, in their order; where it has guesses, one more than these. scores: of
    prompts whose log-probabilities are wanted, what the chunks told of the tokens behind `request.scored`."""

    choices: list[Choice]
    scores: list[tuple[Request, list[list[RawLogprob]]]]


class Runner:
    """Owns nothing that outlives a request but the cache, whose pages the scheduler hands out."""

    def __init__(self, model: Model, kv: KVCache, builder: BatchBuilder, sampler: Sampler) -> None:
        self._model = model
        self._kv = kv
        self._builder = builder
        self._sampler = sampler

    def run(self, chunks: Sequence[Chunk]) -> StepOutput:
        """Compute the chunks. Waits for the device."""
        with torch.inference_mode():
            batch = self._builder.build(chunks)
            hidden = self._model.forward(batch.input_ids, batch.meta, self._kv)
            scores = [(part.request, self._score(hidden, part)) for part in batch.scores]
            if not batch.sampling:
                self._wait()
                return StepOutput([], scores)
            rows = hidden if batch.logit_rows is None else hidden.index_select(0, batch.logit_rows)
            choices = self._sampler(self._model.compute_logits(rows), batch.sampling)
        return StepOutput(choices, scores)

    def _score(self, hidden: Tensor, part: Scored) -> list[list[RawLogprob]]:
        rows = hidden[part.row : part.row + len(part.targets)]
        top = part.request.params.prompt_logprobs or 0
        return score(self._model.compute_logits, rows, part.targets, top=top, vocab_size=self._sampler.vocab_size)

    def _wait(self) -> None:
        """The builder's buffers may be written again only once their copies are done."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
