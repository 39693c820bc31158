"""The order of rows for a call: what is named, what may run, what was measured, and what the rows say of themselves.

Measured times move only rows that were measured, among the places that these have by preference, priority and name:
they say nothing of a row that was not there. Everything here depends on declarations and records alone, so that every
process chooses alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from . import timing_records
from .facts import Facts
from .filters import Verdict, preference
from .timings import Timing


@dataclass(frozen=True, slots=True)
class Measured:
    """What the records say of a row for a call. place: among the rows that rank, from 0; None where its time ranks
    nothing. exact: whether just this shape was measured, and not one of its bucket."""

    timing: Timing
    place: int | None
    exact: bool
    dims: tuple[tuple[str, int], ...]
    label: str
    device: str
    layer: str
    date: str

    def __str__(self) -> str:
        where = "" if self.exact else f", measured at {', '.join(f'{k}={v}' for k, v in self.dims)}"
        flags = "".join(f", {flag}" for flag in self.timing.flags)
        return f"{self.timing.us:.4g} us {self.label}{flags} on {self.device} on {self.date}{where}"

    def as_json(self) -> dict[str, object]:
        t = self.timing
        return {
            "us": t.us,
            "p10": t.p10,
            "p90": t.p90,
            "ratio": [t.ratio, t.low, t.high],
            "flags": list(t.flags),
            "place": self.place,
            "exact": self.exact,
            "dims": dict(self.dims),
            "label": self.label,
            "device": self.device,
            "layer": self.layer,
            "date": self.date,
        }


def ordered(judged: Iterable[Verdict], facts: Facts, named: set[str]) -> tuple[Verdict, ...]:
    """Verdicts, best first among the admitted, then the others by name; with what was measured of each."""
    stated = sorted(judged, key=lambda v: _stated(v, facts, named))
    found = timing_records.find(facts)
    if found is None:
        return tuple(stated)
    point = found.point
    about = (found.exact, tuple(sorted(point.dims.items())), point.label, found.kind, found.layer, point.date)
    places = {name: place for place, name in enumerate(found.order)}
    measured = {name: Measured(timing, places.get(name), *about) for name, timing in found.rows.items()}
    told = [replace(v, measured=measured.get(v.row.name)) for v in stated]
    result: list[Verdict] = []
    for key, group in groupby(told, key=lambda v: (v.row.name not in named, not v.admitted)):
        rows = list(group)
        result += rows if key[1] else _by_time(rows, places)
    return tuple(result)


def outranks(verdict: Verdict, floor: Verdict, facts: Facts) -> bool:
    """Whether a row that is out would come before the floor, were it admitted: one that nobody measured may not."""
    return ordered((replace(verdict, reasons=()), floor), facts, set())[0].row is verdict.row


def _by_time(group: list[Verdict], places: dict[str, int]) -> list[Verdict]:
    """The same rows, those that were measured in their measured order in the places that they share."""
    faster = iter(sorted((v for v in group if v.row.name in places), key=lambda v: places[v.row.name]))
    return [next(faster) if v.row.name in places else v for v in group]


def _stated(verdict: Verdict, facts: Facts, named: set[str]) -> tuple[Any, ...]:
    """Without measurements: named, admitted, preference, priority, and the name, so that two registrations in another
    order decide alike."""
    row = verdict.row
    return (
        row.name not in named,
        not verdict.admitted,
        -preference(row, facts),
        -row.priority,
        row.is_native,
        row.name,
    )
