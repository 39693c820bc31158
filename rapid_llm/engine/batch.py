"""From the scheduler's chunks to the tensors of one forward pass: one layout for prefill, resumed chunks and decode.

Host integers go into buffers that are allocated once; each field is uploaded with one copy. On a CPU there is nothing
to upload, so the tensors are views of the buffers: a batch is good until the next one is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rapid_llm.models.attention_metadata import AttentionMetadata

from .request import Request
from .scheduler import Chunk


@dataclass(frozen=True, slots=True)
class Batch:
    """input_ids: (tokens,) int64. sampling: whom each row of logits is for, a request with guesses having one more row
    than guesses. logit_rows: (len(sampling),) int64 rows of the hidden states they are sampled from, None where that is
    every row. scores: parts of the hidden states that predict prompts whose log-probabilities are wanted."""

    input_ids: Tensor
    meta: AttentionMetadata
    sampling: list[Request]
    logit_rows: Tensor | None
    scores: list[Scored]


class Scored(NamedTuple):
    """Rows `row` and on of the hidden states predict `targets`, the next tokens of the prompt of `request`."""

    request: Request
    row: int
    targets: list[int]


class BatchBuilder:
    """max_tokens, max_sequences, max_rows: of one step, the last of logits. max_pages: of one sequence."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_sequences: int,
        max_rows: int,
        max_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._page_size = page_size
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._ids, self._ids_np = self._buffer(max_tokens, torch.int64)
        self._positions, self._positions_np = self._buffer(max_tokens, torch.int64)
        self._slots, self._slots_np = self._buffer(max_tokens, torch.int64)
        self._rows, self._rows_np = self._buffer(max_rows, torch.int64)
        self._cu_seqlens, self._cu_seqlens_np = self._buffer(max_sequences + 1, torch.int32)
        self._seq_lens, self._seq_lens_np = self._buffer(max_sequences, torch.int32)
        self._table, self._table_np = self._buffer(max_sequences * max_pages, torch.int32)

    def build(self, chunks: Sequence[Chunk]) -> Batch:
        """The batch of `chunks`, whose requests own the pages for it."""
        count = len(chunks)
        width = max(len(chunk.request.pages.ids) for chunk in chunks)
        table = self._table_np[: count * width].reshape(count, width)
        sampling: list[Request] = []
        scores: list[Scored] = []
        tokens = 0
        for i, (request, size, samples, draft) in enumerate(chunks):
            if request.num_computed < request.prompt_len - 1 and request.wants_scores:
                scores += _scored(request, size, tokens)
            tokens = self._place(request, size, tokens, draft)
            self._seq_lens_np[i] = request.num_computed + size
            self._cu_seqlens_np[i + 1] = tokens
            held = len(request.pages.ids)
            table[i, :held] = request.pages.ids
            table[i, held:] = 0
            if draft:
                rows = slice(len(sampling), len(sampling) + size)
                self._rows_np[rows] = np.arange(tokens - size, tokens)
                sampling.append(request)
                sampling += [request.ahead(count) for count in range(1, size)]
            elif samples:
                self._rows_np[len(sampling)] = tokens - 1
                sampling.append(request)
        meta = AttentionMetadata(
            positions=self._upload(self._positions, tokens),
            slot_mapping=self._upload(self._slots, tokens),
            cu_seqlens_q=self._upload(self._cu_seqlens, count + 1),
            seq_lens=self._upload(self._seq_lens, count),
            block_table=self._upload(self._table, count * width).view(count, width),
            decode=tokens == count,
        )
        logit_rows = None if len(sampling) == tokens else self._upload(self._rows, len(sampling))
        return Batch(self._upload(self._ids, tokens), meta, sampling, logit_rows, scores)

    def _place(self, request: Request, size: int, offset: int, draft: tuple[int, ...]) -> int:
        """Write the ids, positions and slots of one chunk from `offset` on; returns the offset behind it."""
        start, page_size = request.num_computed, self._page_size
        if size == 1:
            self._ids_np[offset] = request.ids[start]
            self._positions_np[offset] = start
            self._slots_np[offset] = request.pages.ids[start // page_size] * page_size + start % page_size
            return offset + 1
        end = offset + size
        self._ids_np[offset : end - len(draft)] = request.ids[start : start + size - len(draft)]
        self._ids_np[end - len(draft) : end] = draft
        positions = np.arange(start, start + size)
        self._positions_np[offset:end] = positions
        pages = np.array(request.pages.ids, dtype=np.int64)
        self._slots_np[offset:end] = pages[positions // page_size] * page_size + positions % page_size
        return end

    def _buffer(self, size: int, dtype: torch.dtype) -> tuple[Tensor, np.ndarray]:
        tensor = torch.zeros(size, dtype=dtype, pin_memory=not self._on_cpu)
        return tensor, tensor.numpy()

    def _upload(self, buffer: Tensor, size: int) -> Tensor:
        # The copy may be asynchronous: every step ends by reading its sampled ids, so the buffer is idle by then.
        view = buffer[:size]
        return view if self._on_cpu else view.to(self._device, non_blocking=True)


def _scored(request: Request, size: int, offset: int) -> list[Scored]:
    """What a chunk of `size` tokens that begins at row `offset` tells of its prompt beyond what is known."""
    start = max(request.num_computed, request.scored - 1)
    targets = request.ids[start + 1 : min(request.num_computed + size + 1, request.prompt_len)]
    return [Scored(request, offset + start - request.num_computed, targets)] if targets else []
