"""Texts to vectors: a decoder's final hidden states, pooled, at length 1.

They run between the steps of an engine, in its cache and through its decoder, as prompts do, but nothing is
sampled, and prefixes are neither looked up nor learnt: what the cache knows is keys and values, not hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from torch import Tensor

from .core import Engine
from .params import SamplingParams
from .request import Request
from .scheduler import Chunk

POOLINGS: Final = ("mean", "last")


class Embedding:
    """Vectors of prompts. Call `work` on the thread that drives the engine until it returns True; then read `vectors`.

    prompts: checked token ids, each shorter than the context. pooling: `mean` of the hidden states of all tokens, in
    float64, or `last`, the last token's. Each vector is divided by its Euclidean length.
    """

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], pooling: str = "mean") -> None:
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r} is not known; use one of {', '.join(POOLINGS)}")
        for ids in prompts:
            engine.scheduler.check_fits(len(ids))
        self._engine = engine
        self._mean = pooling == "mean"
        self._requests = [
            Request(f"embedding {i}", 0, len(ids), list(ids), SamplingParams(), key=0, max_len=len(ids) + 1)
            for i, ids in enumerate(prompts)
        ]
        self._sums: list[Tensor | None] = [None] * len(prompts)

    @property
    def vectors(self) -> list[list[float]]:
        """(prompts, hidden), each row of length 1, or all zeros where the hidden states add up to that.

        Raises `ArithmeticError` where they hold NaN or infinities.
        """
        found = []
        for i, total in enumerate(self._sums):
            if total is None or self._requests[i].remaining:
                raise RuntimeError("the vectors are asked for before the work is done")
            length = float(total.norm())
            if not length < float("inf"):
                raise ArithmeticError(f"the hidden states of input {i} hold NaN or infinities")
            found.append((total / length if length else total).tolist())
        return found

    def work(self, beat: Callable[[], None]) -> bool:
        """One forward pass over as many prompts as a step has tokens for, or over one longer prompt in several passes.

        Returns whether all is done. Does nothing while the requests of the engine leave too few pages. beat: called
        after each pass.
        """
        pool = self._engine.scheduler.pool
        requests = self._next()
        try:
            while any(request.remaining for request in requests):
                self._compute(requests)
                beat()
        finally:
            for request in requests:
                pool.release(request.pages)
        return not any(request.remaining for request in self._requests)

    def _next(self) -> list[Request]:
        """Prompts that a step has tokens for, at least one of them if there are pages for it."""
        scheduler = self._engine.scheduler
        budget, requests = scheduler.max_batch_tokens, []
        for request in self._requests:
            length = len(request.ids)
            if not request.remaining:
                continue
            full = len(requests) == scheduler.max_running or (requests and length > budget)
            if full or not scheduler.pool.grow(request.pages, length, length):
                break
            requests.append(request)
            budget -= length
        return requests

    def _compute(self, requests: Sequence[Request]) -> None:
        """The next pass; only a prompt that is alone needs more than one."""
        most = self._engine.scheduler.max_batch_tokens
        chunks = [Chunk(request, min(request.remaining, most), False) for request in requests]
        hidden = self._engine.runner.hidden_states(chunks)
        offset = 0
        for chunk in chunks:
            rows = hidden[offset : offset + chunk.size].double()
            offset += chunk.size
            index = self._requests.index(chunk.request)
            before = self._sums[index]
            if self._mean:
                self._sums[index] = rows.sum(0).cpu() if before is None else before + rows.sum(0).cpu()
            else:
                self._sums[index] = rows[-1].cpu()
            chunk.request.num_computed += chunk.size
