"""Plans: what flashinfer works out on the host for a batch, once a step and not once a layer.

A plan follows from the batch's metadata (lengths, block table, offsets), which every layer of a step passes as the very
same tensors. It is kept until a call comes with other tensors, or with the same ones written since: torch counts the
writes of every tensor made outside of `torch.inference_mode()`. Where torch counts none, each call plans anew.

There is one slot for each device, stream and kind of wrapper, because a plan lives in the wrapper's own buffers: what
another stream planned may still be read by its kernels. Planning copies lengths to the host, and so waits for the
device: the rows are not `graph_safe`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels.registry import ArgumentError
from rapid_llm.kernels.registry.forking import Lock

WORKSPACE_BYTES: Final = 384 << 20
"""Room for the partial results of split sequences: enough for 64 heads of 256 on 132 multiprocessors."""

MAX_SLOTS: Final = 8
"""Slots kept; the least recently used one goes first."""

_lock: Final = Lock()
_slots: Final[OrderedDict[tuple[Any, ...], Slot]] = OrderedDict()
_workspaces: Final[weakref.WeakValueDictionary[tuple[Any, ...], _Workspace]] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class _Workspace:
    """The scratch memory of one device and stream, shared by its slots: they run one after another.

    lock: held from planning until the last kernel of a call is launched. Two threads may share a stream, and neither a
    plan nor the partial results of one may be overwritten by the other.
    """

    memory: Tensor
    lock: Lock = field(default_factory=Lock)


@dataclass(frozen=True)
class Batch:
    """A batch as flashinfer sees it. indptr, last_page: (sequences + 1,), (sequences,) int32 on the host; indices:
    the pages of all sequences, back to back. blind: queries that see no key, on the device, or None; queries: how
    many there are before the padding; offsets: of each sequence's queries, on the host (prefill only)."""

    indptr: Tensor
    indices: Tensor
    last_page: Tensor
    blind: Tensor | None
    queries: int
    keys: int
    offsets: Tensor | None = None


@dataclass(eq=False)
class Slot:
    """One wrapper and the plan it holds."""

    wrapper: Any
    workspace: _Workspace
    batch: Batch | None = None
    settings: tuple[Any, ...] = ()
    seen: tuple[tuple[weakref.ref[Tensor], int], ...] = ()

    @property
    def lock(self) -> Lock:
        """Hold it around `plan` and the launch."""
        return self.workspace.lock

    def plan(
        self,
        settings: tuple[Any, ...],
        metadata: tuple[Tensor, ...],
        make: Callable[[], Batch],
        plan: Callable[[Any, Batch], None],
    ) -> Batch:
        """The batch of `metadata`; `make` reads it and `plan(wrapper, batch)` runs only if something changed."""
        if self.batch is not None and self.settings == settings and self._unchanged(metadata):
            return self.batch
        self.batch = None  # should planning fail, nothing of the old plan may serve
        batch = make()
        if batch.keys:
            plan(self.wrapper, batch)
        self.settings = settings
        tracked = not any(t.is_inference() for t in metadata)
        self.seen = tuple((weakref.ref(t), t._version) for t in metadata) if tracked else ()
        self.batch = batch
        return batch

    def _unchanged(self, metadata: tuple[Tensor, ...]) -> bool:
        return len(self.seen) == len(metadata) and all(
            ref() is tensor and version == tensor._version
            for (ref, version), tensor in zip(self.seen, metadata, strict=True)
        )


def slot(kind: str, device: torch.device, make_wrapper: Callable[[Tensor], Any]) -> Slot:
    """The slot of `kind` for the current stream of `device`; `make_wrapper(workspace)` makes what it holds."""
    place = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    with _lock:
        found = _slots.get((kind, *place))
        if found is None:
            workspace = _workspaces.get(place)
            if workspace is None:
                workspace = _Workspace(torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device))
                _workspaces[place] = workspace
            found = _slots[kind, *place] = Slot(make_wrapper(workspace.memory), workspace)
            while len(_slots) > MAX_SLOTS:
                _slots.popitem(last=False)
        _slots.move_to_end((kind, *place))
        return found


def forget() -> None:
    """Drop every wrapper, plan and workspace."""
    with _lock:
        _slots.clear()


def decode_batch(op: str, seq_lens: Tensor, block_table: Tensor, pages: int, page_size: int) -> Batch:
    """One query a sequence. Raises `ArgumentError` for a sequence longer than its block table row, or a page that the
    cache does not have: flashinfer would read beside it."""
    lengths = seq_lens.cpu().long().clamp(min=0)
    indptr, indices, last_page = _pages(op, lengths, block_table, pages, page_size)
    blind = (lengths == 0).nonzero().squeeze(1)
    return Batch(indptr, indices, last_page, _on(blind, seq_lens.device), len(lengths), int(lengths.sum()))


def prefill_batch(
    op: str, offsets: Tensor, seq_lens: Tensor, block_table: Tensor, tokens: int, pages: int, page_size: int
) -> Batch:
    """Chunks of queries. The first queries of a chunk longer than its sequence see nothing; they become a sequence
    without keys, so that each other chunk is no longer than its keys."""
    starts, lengths = offsets.cpu().long(), seq_lens.cpu().long().clamp(min=0)
    chunks = starts.diff()
    if bool((chunks < 0).any()) or int(starts[0]) != 0 or int(starts[-1]) > tokens:
        raise ArgumentError(
            f"{op}: cu_seqlens_q must rise from 0 to at most {tokens} (the tokens of query), got {starts.tolist()}"
        )
    unseen = (chunks - lengths).clamp(min=0)
    owners = torch.arange(len(lengths)).repeat_interleave((unseen > 0).long() + 1)
    first = torch.ones(len(owners), dtype=torch.bool)
    first[1:] = owners[1:] != owners[:-1]
    alone = first & (unseen[owners] > 0)  # the keyless part of a chunk
    sizes = torch.where(alone, unseen[owners], chunks[owners] - torch.where(alone, 0, unseen[owners]))
    keys = torch.where(alone | (sizes == 0), 0, lengths[owners])
    indptr, indices, last_page = _pages(op, keys, block_table, pages, page_size, owners)
    parts = torch.cat((torch.zeros(1, dtype=torch.long), sizes.cumsum(0)))
    blind = torch.arange(int(parts[-1])).masked_select(alone.repeat_interleave(sizes))
    blind = torch.cat((blind, torch.arange(int(parts[-1]), tokens)))  # and the padding
    where = _on(blind, seq_lens.device)
    return Batch(indptr, indices, last_page, where, int(parts[-1]), int(keys.sum()), parts.int())


def _pages(
    op: str, lengths: Tensor, block_table: Tensor, pages: int, page_size: int, owners: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr, indices, last_page) of sequences with `lengths` keys; owners: their rows of block_table."""
    counts = -(-lengths // page_size)
    width = block_table.shape[1]
    if len(counts) and int(counts.max()) > width:
        worst = int(counts.argmax())
        raise ArgumentError(
            f"{op}: a sequence has {int(lengths[worst])} keys, its block_table row {width} pages of {page_size}"
        )
    table = block_table.cpu()
    table = table if owners is None else table[owners]
    indices = table[torch.arange(width) < counts[:, None]].int()
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < pages:
        raise ArgumentError(
            f"{op}: the block table names pages {int(indices.min())} to {int(indices.max())}; the cache has pages 0 to "
            f"{pages - 1}"
        )
    indptr = torch.cat((torch.zeros(1, dtype=torch.long), counts.cumsum(0))).int()
    last_page = (lengths - (counts - 1).clamp(min=0) * page_size).int()
    return indptr, indices, last_page


def _on(rows: Tensor, device: torch.device) -> Tensor | None:
    return rows.to(device) if len(rows) else None
