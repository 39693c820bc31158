"""Tiles for calls, from the search to the records."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rapid_llm.kernels import registry
from rapid_llm.kernels.ops import tile_policy
from rapid_llm.kernels.registry import tile_records, timing_records
from rapid_llm.kernels.registry.records import SHIPPED, USER
from rapid_llm.verify import pool

from .calls import Call
from .measure import device_kind
from .tiles import Do, Found, Question, Task, children, native_row, search


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call: an outcome for each of its questions; failure: why there is none."""

    call: Call
    row: str
    found: tuple[Found, ...] = ()
    failure: str = ""

    def json(self) -> dict[str, Any]:
        return {
            "call": str(self.call),
            "row": self.row,
            "failure": self.failure,
            "tiles": [_found_json(found) for found in self.found],
        }


def _found_json(found: Found) -> dict[str, Any]:
    best = found.best
    return {
        "question": str(found.question),
        "heuristic": dict(found.question.stated),
        "best": None if best is None else dict(best.meta),
        "ratio": None if best is None or best.timing is None else best.timing.ratio,
        "text": found.text,
        "tried": len(found.tried),
        "out": [{"meta": dict(t.meta), "why": t.failure} for t in found.tried if t.failure],
    }


def target(write: str, device: str) -> Path | None:
    """The file that `user`, `shipped` or a folder means; None for `none`."""
    if write == "none":
        return None
    kind = device_kind(device)
    if write in (USER, SHIPPED):
        return tile_records.path_of(write, kind)
    return Path(write) / tile_records.path_of(USER, kind).name


def tune(
    calls: Iterable[Call], device: str, *, path: Path | None, seconds: float, do: Do = children
) -> Iterator[Outcome]:
    """Search tiles for every question of every call; what is proven is written at once. Questions that calls share are
    searched for once, by the first of them."""
    done: set[str] = set()
    for call in calls:
        row = native_row(call).name
        (answer,) = do([Task("ask", call, row, device)])
        if isinstance(answer, pool.Lost | str):
            why = answer.why if isinstance(answer, pool.Lost) else answer
            yield Outcome(call, row, failure=f"the row does not answer as it is: {why}")
            continue
        asked: list[Question] = [question for question in answer if str(question) not in done]
        done |= {str(question) for question in asked}
        if not answer:
            yield Outcome(call, row, failure="it asks for no tiles here: Triton runs nothing of it on this device")
            continue
        found = tuple(search(call, question, row, device, do, seconds=seconds) for question in asked)
        if path is not None:
            save(found, row, device, path)
        yield Outcome(call, row, found)


def save(found: Iterable[Found], row: str, device: str, path: Path) -> None:
    """Write what is better than the heuristic to a file of records."""
    source = timing_records.source_of(registry.get_row(row))
    if source is None:
        raise ValueError(f"{row}: its source cannot be read, so no record could tell when its tiles are stale")
    entries = []
    for one in found:
        if one.best is not None and one.best.timing is not None:
            t = one.best.timing
            about = (one.question.name, row, one.question.dims, one.best.meta, one.question.stated)
            today = datetime.date.today().isoformat()
            entries.append(tile_records.Tuned(*about, t.us, t.ratio, t.low, t.high, today, torch.__version__))
    if entries:
        tile_records.write(path, device_kind(device), entries, {row: source})
        tile_policy.forget()
