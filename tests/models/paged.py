"""A trivial paged cache for tests: every sequence owns pages scattered over the pool, page 0 belongs to nobody."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from rapid_llm.models.attention_metadata import AttentionMetadata
from rapid_llm.models.decoder import Decoder

PAGE = 16


class PagedRunner:
    """Runs chunks of several sequences through a decoder and remembers where their keys and values lie."""

    def __init__(self, decoder: Decoder, sequences: int, capacity: int, seed: int = 0) -> None:
        config = decoder.config
        per_sequence = -(-capacity // PAGE)
        pages = list(range(1, 1 + sequences * per_sequence))
        random.Random(seed).shuffle(pages)
        self._decoder = decoder
        self._width = per_sequence
        self._pages = [pages[i * per_sequence : (i + 1) * per_sequence] for i in range(sequences)]
        self._lengths = [0] * sequences
        size = (1 + len(pages), PAGE, config.num_kv_heads, config.head_dim)
        kinds = {"dtype": decoder.kv_dtype, "device": decoder.device}
        # NaN in everything not yet written: a read of another sequence's page or of padding cannot go unseen.
        self.kv = [(torch.full(size, torch.nan, **kinds), torch.full(size, torch.nan, **kinds)) for _ in self._layers()]

    def _layers(self) -> range:
        return range(self._decoder.config.num_layers)

    def hidden(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
        """Final hidden states of `chunks`: (sequence, its next ids), in one forward pass."""
        device = self._decoder.device
        positions, slots, ids, offsets, lengths = [], [], [], [0], []
        tables = [self._pages[sequence] for sequence, _ in chunks]
        for sequence, new in chunks:
            start = self._lengths[sequence]
            for i, token in enumerate(new):
                at = start + i
                ids.append(token)
                positions.append(at)
                slots.append(self._pages[sequence][at // PAGE] * PAGE + at % PAGE)
            self._lengths[sequence] = start + len(new)
            offsets.append(len(ids))
            lengths.append(start + len(new))
        meta = AttentionMetadata(
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_table=torch.tensor(tables, dtype=torch.int32, device=device).view(len(chunks), self._width),
            decode=len(ids) == len(chunks),
        )
        return self._decoder.forward(torch.tensor(ids, dtype=torch.int64, device=device), meta, self.kv)

    def logits(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
        """(tokens, vocab) fp32 logits of every token of `chunks`."""
        return self._decoder.compute_logits(self.hidden(chunks))


def greedy(decoder: Decoder, prompt: Sequence[int], steps: int) -> tuple[list[int], torch.Tensor]:
    """Greedy ids of one prompt, and the (steps, vocab) log-probabilities that they were chosen from."""
    runner = PagedRunner(decoder, 1, len(prompt) + steps)
    out, rows, new = [], [], list(prompt)
    for _ in range(steps):
        row = runner.logits([(0, new)])[-1].log_softmax(-1)
        new = [int(row.argmax())]
        out += new
        rows.append(row)
    return out, torch.stack(rows)
