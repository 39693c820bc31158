"""Decode steps of fixed size: padded to one of a few batch sizes and, on a GPU, replayed as one CUDA graph.

A graph is keyed by its padded batch and nothing else. Lengths are data: every kernel in it reads them on the device, so
one graph serves a context of ten tokens and one of ten thousand. Rows beyond the batch have length 0 and write to the
null page, which is nobody's.

Invariant: what a graph computes is what the same calls compute one by one. Each is compared with them, bit for bit, on
the first real batch of its size, and not used where that fails. Whatever keeps a step from running as a graph is
counted under its reason.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rapid_llm.graphs import capture
from rapid_llm.models.attention_metadata import AttentionMetadata, KVCache

from .scheduler import Chunk

_log = logging.getLogger(__name__)

NOT_ALL_DECODE: Final = "a prompt, or guesses to verify, are in the step"
OBSERVED: Final = "the step's ops are being timed one by one"


@dataclass(slots=True)
class GraphReport:
    """captured: padded batches that run as a graph. steps: by graph, or padded where there is no capture. ahead: those
    of them that were enqueued before the step before was done. eager: steps that ran call by call, by reason, those of
    prefill among them. refused: padded batches that never run as a graph, and why."""

    captured: list[int] = field(default_factory=list)
    steps: int = 0
    ahead: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    refused: dict[int, str] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        return {
            "captured": sorted(self.captured),
            "graph_steps": self.steps,
            "graph_steps_ahead": self.ahead,
            "eager_steps": dict(self.eager),
            "refused": {str(size): reason for size, reason in sorted(self.refused.items())},
        }


def padded_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes to pad to: 1, 2, 4, 8, then multiples of 8, 16 and 32."""
    sizes = {1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *range(160, most + 32, 32)}
    return tuple(sorted({*(size for size in sizes if size < most), most}))


@dataclass(slots=True, eq=False)
class _Size:
    """One padded batch: its inputs, at addresses that stay, its results, and what makes these of those."""

    numbers: Tensor
    meta: AttentionMetadata
    graph: Any = None
    logits: Tensor | None = None
    checked: bool = False


class DecodeGraphs:
    """model: as in `Runner`. max_sequences: of a step. max_pages: of a sequence. captures: whether
    steps become graphs; without, they have the same sizes and the same padding, on any device, which tells a fault of
    padding from one of capture. agree: whether what is true here is true on every rank, where there are several: they
    replay a graph together or not at all."""

    def __init__(
        self,
        model: Any,
        kv: KVCache,
        *,
        max_sequences: int,
        max_pages: int,
        page_size: int,
        captures: bool,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self.report = GraphReport()
        self._model = model
        self._kv = kv
        self._page_size = page_size
        self._device: torch.device = model.device
        self._captures = captures
        self._agree = agree
        self._pin = self._device.type == "cuda"
        self._sizes = padded_sizes(max_sequences)
        self._made: dict[int, _Size] = {}
        self._table = torch.zeros(max_sequences, max_pages, dtype=torch.int32, device=self._device)
        self._table_of: list[tuple[Any, int, int]] = []
        self._pool: Any = None

    def refusal(self, chunks: Sequence[Chunk]) -> str | None:
        """Why a step of `chunks` cannot run here; None where it can."""
        if self._model.observed:
            return OBSERVED
        if not all(chunk.size == 1 and chunk.samples for chunk in chunks):
            return NOT_ALL_DECODE
        return self._refused(self._padded(len(chunks)))

    def logits(self, chunks: Sequence[Chunk], *, ahead: bool = False) -> Tensor:
        """Enqueue the step; (len(chunks), vocab) fp32 logits, good until the next step is enqueued.

        ahead: the step before is still running: each request is taken to have one token more than it knows of, which
        `take_tokens` has put in place.
        """
        padded = self._padded(len(chunks))
        size = self._size(padded)
        self._fill(size, chunks, ahead)
        self.report.steps += 1
        self.report.ahead += ahead
        if not self._captures or padded in self.report.refused:  # behind the step that was refused
            return self._forward(size)[: len(chunks)]
        if size.graph is None or size.logits is None or not size.checked:
            return self._first(size, len(chunks))[: len(chunks)]
        size.graph.replay()
        return size.logits[: len(chunks)]

    def take_tokens(self, tokens: Tensor) -> None:
        """Make `tokens`, sampled for the step that was enqueued last, the input of the one behind it."""
        size = self._size(self._padded(len(tokens)))
        size.numbers[0, : len(tokens)].copy_(tokens, non_blocking=True)

    def rehearse(self) -> Sequence[tuple[str, Callable[[], None]]]:
        """(what it is, a function that does it): capture every size, on the null page, before there are requests."""

        def captured(count: int) -> Callable[[], None]:
            def run() -> None:
                if self._captures and self._refused(count) is None and self._size(count).graph is None:
                    size = self._size(count)
                    self._forward(size)
                    self._capture(count, size)

            return run

        return [(f"the graph of a decode step of {count} requests", captured(count)) for count in self._sizes]

    def _padded(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)

    def _refused(self, padded: int) -> str | None:
        if self._captures and padded not in self._made and padded not in self.report.refused:
            unsafe = sorted({h.spec.name for h in self._model.handles(padded) if not h.spec.graph_safe})
            if unsafe:
                self._refuse(padded, f"{', '.join(unsafe)}: declared as not safe in a graph")
        return self.report.refused.get(padded)

    def _refuse(self, padded: int, reason: str) -> None:
        _log.warning("decode steps of %d requests run without a CUDA graph: %s", padded, reason)
        self.report.refused[padded] = reason

    def _size(self, padded: int) -> _Size:
        size = self._made.get(padded)
        if size is None:
            numbers = torch.zeros(4, padded, dtype=torch.int64, device=self._device)
            meta = AttentionMetadata(
                positions=numbers[1],
                slot_mapping=numbers[2],
                cu_seqlens_q=torch.arange(padded + 1, dtype=torch.int32, device=self._device),
                # The low words of row 3: two of its numbers hold the lengths of two sequences each.
                seq_lens=numbers[3].view(torch.int32)[:padded],
                block_table=self._table[:padded],
                decode=True,
            )
            size = self._made[padded] = _Size(numbers, meta)
        return size

    def _fill(self, size: _Size, chunks: Sequence[Chunk], ahead: bool) -> None:
        """Upload ids, positions, slots and lengths in one copy, and the block table where it has changed."""
        padded, page_size, more = size.numbers.shape[1], self._page_size, int(ahead)
        host = torch.zeros(4, padded, dtype=torch.int64, pin_memory=self._pin)
        ids, positions, slots, lengths = host.numpy()
        lengths = lengths.view(np.int32)
        for i, (request, _, _, _) in enumerate(chunks):
            position = request.num_computed + more
            if not ahead:
                ids[i] = request.ids[position]
            positions[i] = position
            slots[i] = request.pages.ids[position // page_size] * page_size + position % page_size
            lengths[i] = position + 1
        size.numbers[more:].copy_(host[more:], non_blocking=True)
        self._fill_table(chunks)

    def _fill_table(self, chunks: Sequence[Chunk]) -> None:
        held = [(chunk.request, len(chunk.request.pages.ids), chunk.request.preemptions) for chunk in chunks]
        if held == self._table_of:
            return
        self._table_of = held
        count, width = len(held), max(pages for _, pages, _ in held)
        host = torch.zeros(count, width, dtype=torch.int32, pin_memory=self._pin)
        rows = host.numpy()
        for i, (request, pages, _) in enumerate(held):
            rows[i, :pages] = request.pages.ids
        self._table[:count, :width].copy_(host.to(self._device, non_blocking=True))

    def _forward(self, size: _Size) -> Tensor:
        hidden = self._model.forward(size.numbers[0], size.meta, self._kv)
        logits: Tensor = self._model.compute_logits(hidden)
        return logits

    def _first(self, size: _Size, count: int) -> Tensor:
        """The step call by call, then captured and replayed over the same inputs: writing the same keys and values
        twice changes nothing. Where the two differ, or capture fails, the calls' results stand and there is no graph.
        """
        padded = size.numbers.shape[1]
        logits = self._forward(size)
        captured = size.graph is not None or self._capture(padded, size)
        if not self._agree(captured) or size.logits is None:
            if captured:
                self._drop(padded, size, "another rank could not capture it")
            return logits
        size.graph.replay()
        same = torch.equal(logits[:count].view(torch.int32), size.logits[:count].view(torch.int32))
        size.checked = self._agree(same)
        if not size.checked:
            worst = (logits[:count] - size.logits[:count]).abs().max().item()
            whose = "on another rank" if same else f"by up to {worst:.3g}"
            self._drop(padded, size, f"the graph's logits differ from the calls' {whose}")
        return logits

    def _capture(self, padded: int, size: _Size) -> bool:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with capture(graph, stream, pool=self._pool):
                logits = self._forward(size)
        except RuntimeError as error:
            self._drop(padded, size, f"capture failed: {error}")
            return False
        torch.cuda.current_stream(self._device).wait_stream(stream)
        size.graph, size.logits = graph, logits
        self.report.captured.append(padded)
        return True

    def _drop(self, padded: int, size: _Size, reason: str) -> None:
        size.graph = size.logits = None
        if padded in self.report.captured:
            self.report.captured.remove(padded)
        self._refuse(padded, reason)
