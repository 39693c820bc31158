"""A run over many calls: which, in which order, until when, and where the records go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rapid_llm.bench.host import Clock
from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import timing_records
from rapid_llm.kernels.registry.records import SHIPPED, USER

from . import measure
from .calls import Call
from .measure import Result

Measure = Callable[[Call, str], Result]
"""Measures a call on a device."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Ops whose rows are measured; rows: only these, beside the one that dispatch chooses; all where empty."""

    ops: tuple[str, ...]
    rows: tuple[str, ...] = ()


def select(names: Sequence[str]) -> Selection:
    """What ops and rows by name mean; every op where there is no name. Raises `UnknownRowError` for neither."""
    known = [op.id for op in registry.ops()]
    ops = [name for name in names if name in known]
    rows = [registry.get_row(name) for name in names if name not in known]
    wanted = dict.fromkeys((*ops, *(row.op for row in rows)))
    return Selection(tuple(wanted) or tuple(known), tuple(row.name for row in rows if row.op not in ops))


def target(write: str | None, device: str) -> Path | None:
    """The file that `user`, `shipped` or a folder means; None where nothing is to be written."""
    if write is None:
        return None
    kind = measure.device_kind(device)
    if write in (USER, SHIPPED):
        return timing_records.path_of(write, kind)
    return Path(write) / timing_records.path_of(USER, kind).name


def run(
    calls: Iterable[Call],
    device: str,
    *,
    path: Path | None,
    measured: Measure,
    seconds: float | None,
    clock: Clock,
    told: Callable[[Result], None],
) -> Iterator[Result]:
    """Measure calls op by op, and write the records of an op as soon as all its calls are measured.

    `told` hears of each result before it is recorded. No call is begun after `seconds`; what is left then is told as
    not measured. Yields the results as recorded.
    """
    started = clock()
    ordered = sorted(enumerate(calls), key=lambda entry: entry[1].op)
    for _, group in groupby(ordered, key=lambda entry: entry[1].op):
        results = []
        for _, call in group:
            if seconds is not None and (clock() - started) / 1e9 > seconds:
                result = Result(call, "", failure="not begun: the time given for the run was over")
            else:
                result = measured(call, device)
            told(result)
            results.append(result)
        if path is not None and any(r.point is not None for r in results):
            results = measure.record(results, device, path)
        yield from results


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Counts, and the worst regret of a call that was measured."""
    measured = [r for r in results if r.point is not None]
    worst = max(measured, key=lambda r: r.regret, default=None)
    return {
        "calls": len(results),
        "measured": len(measured),
        "changed": sum(r.before != r.after for r in measured),
        "worst_regret": None if worst is None else worst.regret,
        "worst_call": None if worst is None else str(worst.call),
    }
