"""A step's plan as host integers: what rank 0 decides, in one message, and what the other ranks make of it.

A rank needs no requests: which tokens lie where in which pages, and which rows of logits are wanted, is all that a
forward pass depends on. So a plan is complete by itself, and nothing has to be kept in step between processes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .kv_pool import Pages
from .scheduler import Chunk

Mode = Literal["calls", "sizes", "behind", "hidden"]
"""How a step runs: call by call; at a fixed size; so, behind a step whose tokens are not known; for hidden states."""


class PlannedChunk(NamedTuple):
    """What of a `Chunk` a forward pass depends on. ids: from `start` on, one more than are computed where there are."""

    start: int
    size: int
    samples: bool
    draft: tuple[int, ...]
    ids: tuple[int, ...]
    pages: bytes
    prompt_len: int
    scored: int
    wants_scores: bool


class Plan(NamedTuple):
    """One step."""

    mode: Mode
    chunks: tuple[PlannedChunk, ...]


@dataclass(eq=False, slots=True)
class StandIn:
    """In the place of a `Request` on a rank that has none: what batches and graphs read of one."""

    ids: Window
    num_computed: int
    prompt_len: int
    scored: int
    wants_scores: bool
    pages: Pages = field(default_factory=Pages)
    preemptions: int = 0

    def ahead(self, count: int) -> StandIn:
        """As `Request.ahead`, for whoever samples; here nobody does."""
        return self


class Window:
    """Part of a list of ids, under the places that they have in the whole."""

    __slots__ = ("_ids", "_start")

    def __init__(self, start: int, ids: Sequence[int]) -> None:
        self._start = start
        self._ids = ids

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return self._ids[self._within(place.start) : self._within(place.stop)]
        return self._ids[self._within(place)]

    def _within(self, place: int) -> int:
        if not 0 <= place - self._start <= len(self._ids):
            raise IndexError(f"id {place} is outside of the plan's, {self._start} to {self._start + len(self._ids)}")
        return place - self._start


def plan(mode: Mode, chunks: Sequence[Chunk]) -> Plan:
    """The plan of a step of `chunks`."""
    return Plan(mode, tuple(map(_planned, chunks)))


def chunks_of(found: Plan) -> list[Chunk]:
    """The chunks of a plan, of requests that are stand-ins."""
    return [Chunk(_stand_in(chunk), chunk.size, chunk.samples, chunk.draft) for chunk in found.chunks]  # type: ignore[arg-type]


def _planned(chunk: Chunk) -> PlannedChunk:
    request, start = chunk.request, chunk.request.num_computed
    return PlannedChunk(
        start,
        chunk.size,
        chunk.samples,
        chunk.draft,
        tuple(request.ids[start : start + chunk.size + 1]),
        request.pages.ids.tobytes(),
        request.prompt_len,
        request.scored,
        request.wants_scores,
    )


def _stand_in(chunk: PlannedChunk) -> StandIn:
    pages = array("i")
    pages.frombytes(chunk.pages)
    ids = Window(chunk.start, chunk.ids)
    return StandIn(ids, chunk.start, chunk.prompt_len, chunk.scored, chunk.wants_scores, Pages(pages))
