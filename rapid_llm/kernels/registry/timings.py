"""What was measured of a call: the time of every row in one interleaved run, and the order that follows from it.

Near ties never change an order, so neither does noise: a row moves up only where the interval of its ratio to the row
in that place lies beyond the margin, with what the baseline seemed to differ from itself added to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

MARGIN: Final = 0.01
"""Times that differ by less are equal: a row takes another's place only where it is faster by more, noise included. So
the row that stays is, with the noise of a good run, at most some 2 % slower than the fastest."""

FLOOR_LIMITED: Final = "floor-limited"
"""Flag of a result that is hardly more than a launch: no row can be faster, and two of them are equal."""

NO_RANK: Final = ("host-bound",)
"""Flags of results that are shown and rank nothing: it was not the row that took the time."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One row's time of a call: microseconds, and its ratio to the baseline of its run with an interval (1, 1, 1 for
    the baseline itself; less is faster). flags: see `rapid_llm.bench`."""

    us: float
    p10: float
    p90: float
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0
    flags: tuple[str, ...] = ()

    @property
    def ranks(self) -> bool:
        return not set(self.flags) & set(NO_RANK)

    @property
    def at_floor(self) -> bool:
        return FLOOR_LIMITED in self.flags


@dataclass(frozen=True, slots=True)
class Point:
    """One measured call. order: rows that rank, best first. reach: how far the baseline seemed to differ from itself,
    which is noise. label: `cold` or `warm`."""

    op: str
    dtype: str
    scheme: str | None
    dims: Mapping[str, int]
    rows: Mapping[str, Timing]
    order: tuple[str, ...] = ()
    baseline: str = ""
    reach: float = 0.0
    label: str = "cold"
    date: str = ""
    torch: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        return (self.op, self.dtype, self.scheme, tuple(sorted(self.dims.items())))

    def regret(self, chosen: str) -> float:
        """By how much `chosen` is slower than the fastest row that ranks, as a share; 0 where nothing is known or it is
        at the floor."""
        if chosen not in self.order or self.rows[chosen].at_floor:
            return 0.0
        return self.rows[chosen].ratio / min(self.rows[name].ratio for name in self.order) - 1


def order(prior: Sequence[str], rows: Mapping[str, Timing], reach: float = 0.0) -> tuple[str, ...]:
    """The rows that rank, best first. prior: the order so far, in which rows stay wherever they are near ties.

    The first of `prior` keeps its place unless others are faster by more than the margin and the noise. Of these the
    fastest takes it, or the first of `prior` that is a near tie with the fastest. So on for the places below. Nothing
    is faster than a row at the floor, and where all are there, nothing was learnt and there is no order.
    """
    if all(t.at_floor or not t.ranks for t in rows.values()):
        return ()
    left = [name for name in dict.fromkeys((*prior, *sorted(rows))) if name in rows and rows[name].ranks]
    found: list[str] = []
    while left:
        present = left[0]
        better = [name for name in left[1:] if _beats(rows[name], rows[present], reach)]
        if better:
            fastest = min(better, key=lambda name: rows[name].ratio)
            present = next(n for n in left if n in better and not _beats(rows[fastest], rows[n], reach))
        found.append(present)
        left.remove(present)
    return tuple(found)


def _beats(one: Timing, other: Timing, reach: float) -> bool:
    """Whether the whole interval of their ratio lies beyond the margin and the noise of the run."""
    return not other.at_floor and one.high / other.low < 1 - MARGIN - reach


def merged(points: Sequence[Point]) -> Point:
    """Several measurements of what dispatch sees as one call, which differ in something that no dimension names (the
    length of contexts, say): a row's ratio becomes the mean, its interval holds all of them."""
    if len(points) == 1:
        return points[0]
    names = set(points[0].rows).intersection(*(p.rows for p in points[1:]))
    same = [p for p in points if p.baseline == points[0].baseline]
    return replace(
        points[0],
        rows={name: _mean([p.rows[name] for p in same]) for name in sorted(names)},
        reach=max(p.reach for p in same),
    )


def _mean(timings: Sequence[Timing]) -> Timing:
    def middle(values: Sequence[float]) -> float:
        return math.exp(sum(map(math.log, values)) / len(values))

    return Timing(
        us=middle([t.us for t in timings]),
        p10=min(t.p10 for t in timings),
        p90=max(t.p90 for t in timings),
        ratio=middle([t.ratio for t in timings]),
        low=min(t.low for t in timings),
        high=max(t.high for t in timings),
        flags=tuple(sorted({flag for t in timings for flag in t.flags})),
    )
