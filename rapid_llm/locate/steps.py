"""The steps that both sides run: the same ids, at the same places of the cache, in sizes that reach every row at issue.

One run of the plan is one model run. The first fixes the ids of the decode steps; later ones are fed the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from rapid_llm.engine.options import PAGE_SIZE
from rapid_llm.models.attention_metadata import AttentionMetadata, KVCache
from rapid_llm.models.op_table import Bucket, buckets

from .calls import Watch
from .configuration import Side

DECODE: Final = "attention.decode"
DECODED: Final = 2
"""Tokens that the longest prompt is continued by."""

Difference = tuple[str, str, str]
"""(op, row of one side, row of the other)."""


@dataclass(frozen=True, slots=True)
class Step:
    """chunks: (sequence, tokens) that are computed together."""

    chunks: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        sizes = [size for _, size in self.chunks]
        if all(size == 1 for size in sizes):
            return f"decode of {len(sizes)}"
        return f"prefill of {' + '.join(map(str, sizes))} tokens"


@dataclass(slots=True)
class Plan:
    """steps, and the ids so far: prompts, then what the first run chose."""

    steps: tuple[Step, ...]
    ids: list[list[int]]
    prompt_lengths: tuple[int, ...] = field(default=())

    def run(self, side: Side, watch: Watch) -> list[Tensor]:
        """Logits of every step on the CPU, one row for each chunk's last token. A fresh cache, NaN where nothing was
        written, so that a read of what is no token's shows."""
        cache = self._cache(side)
        done = [0] * len(self.ids)
        logits = []
        side.decoder.observe(watch)
        try:
            for number, step in enumerate(self.steps):
                watch.begin(number)
                logits.append(self._step(side, step, cache, done))
        finally:
            side.decoder.observe(None)
        return logits

    def _step(self, side: Side, step: Step, cache: KVCache, done: list[int]) -> Tensor:
        ids, meta = self._batch(step, done, side.device)
        hidden = side.decoder.forward(ids, meta, cache)
        last = meta.cu_seqlens_q[1:].long() - 1
        rows = side.decoder.compute_logits(hidden if meta.decode else hidden.index_select(0, last)).cpu()
        for (sequence, size), row in zip(step.chunks, rows, strict=True):
            done[sequence] += size
            if done[sequence] == len(self.ids[sequence]):
                self.ids[sequence].append(int(row.argmax()))
        return rows

    def _batch(self, step: Step, done: Sequence[int], device: torch.device) -> tuple[Tensor, AttentionMetadata]:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        offsets = [0]
        for sequence, size in step.chunks:
            at = range(done[sequence], done[sequence] + size)
            ids += self.ids[sequence][at.start : at.stop]
            positions += at
            slots += [self._pages(sequence)[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in at]
            offsets.append(len(ids))
        table = [self._pages(sequence) for sequence, _ in step.chunks]
        lengths = [done[sequence] + size for sequence, size in step.chunks]
        meta = AttentionMetadata(
            positions=torch.tensor(positions, device=device),
            slot_mapping=torch.tensor(slots, device=device),
            cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_table=torch.tensor(table, dtype=torch.int32, device=device),
            decode=len(ids) == len(step.chunks),
        )
        return torch.tensor(ids, device=device), meta

    def _width(self) -> int:
        """Pages of one sequence: its prompt, and a token for each step."""
        return -(-(max(self.prompt_lengths) + len(self.steps)) // PAGE_SIZE)

    def _pages(self, sequence: int) -> list[int]:
        """Every other page, from the end: no two neighbours are of one sequence."""
        count = len(self.ids)
        return [1 + i * count + (count - 1 - sequence) for i in reversed(range(self._width()))]

    def _cache(self, side: Side) -> KVCache:
        c = side.decoder.config
        size = (c.num_layers, 2, 1 + len(self.ids) * self._width(), PAGE_SIZE, c.num_kv_heads, c.head_dim)
        whole = torch.full(size, float("nan"), dtype=side.dtype, device=side.device)
        return [(layer[0], layer[1]) for layer in whole]


def differences(a: Side, b: Side) -> dict[str, set[Difference]]:
    """By bucket: the ops for which the sides run other code, or the same code on other numbers."""
    if not a.same_numbers(b):  # every row of b; the sides' linears need not pair up
        return every_row(b)
    found: dict[str, set[Difference]] = {}
    for (where, op, one), (_, _, other) in zip(a.decoder.bindings(), b.decoder.bindings(), strict=True):
        if one.spec.name != other.spec.name:
            found.setdefault(where, set()).add((op, one.spec.name, other.spec.name))
    return found


def every_row(side: Side) -> dict[str, set[Difference]]:
    """By bucket: all rows of a side."""
    found: dict[str, set[Difference]] = {}
    for where, op, handle in side.decoder.bindings():
        found.setdefault(where, set()).add((op, "", handle.spec.name))
    return found


def plan(
    prompts: Sequence[Sequence[int]],
    at_issue: dict[str, set[Difference]],
    context: int,
    ranges: Sequence[Bucket] | None = None,
) -> Plan:
    """Chunks of the longest prompt that reach what is at issue, its rest, the other prompts together, and two decode
    steps: of all sequences, and of one. ranges: of the decoders, by default those of a Llama. Raises `ValueError` for a
    prompt that leaves them no room in `context`."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    ids = [list(prompts[i]) for i in order]
    steps, left = [], len(ids[0])
    for size in _sizes(at_issue, left, buckets() if ranges is None else ranges):
        if size < left:
            steps.append(Step(((0, size),)))
            left -= size
    steps.append(Step(((0, left),)))
    others = tuple((i, len(ids[i])) for i in range(1, len(ids)))
    if others:
        steps += [Step(others), Step(tuple((i, 1) for i in range(len(ids))))]
    steps.append(Step(((0, 1),)))
    if len(ids[0]) + DECODED > context:
        raise ValueError(
            f"a prompt of {len(ids[0])} tokens and {DECODED} more exceed this model's context of {context}: shorten it"
        )
    return Plan(tuple(steps), ids, tuple(len(p) for p in ids))


def _sizes(at_issue: dict[str, set[Difference]], most: int, ranges: Sequence[Bucket]) -> list[int]:
    """Token counts below `most`, ascending, of as few buckets as reach every difference that a prefill can reach."""
    unreached = {d for found in at_issue.values() for d in found if d[0] != DECODE}
    usable = [b for b in ranges if 1 < b.low < most]
    chosen = []
    while usable and unreached:
        best = max(usable, key=lambda b: (len(at_issue.get(str(b), set()) & unreached), b.low))
        reached = at_issue.get(str(best), set()) & unreached
        if not reached:
            break
        unreached -= reached
        chosen.append(best.low)
    return sorted(chosen)
