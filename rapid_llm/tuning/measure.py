"""One call measured over every proven row that can run it, as a point of the records.

The timing is `rapid_llm.bench`'s, with all that it refuses. Rows without evidence are left out: what is not proven is
not chosen, however fast it is. A row that is named can be timed before it is proven, for its author to look at; the
harness still compares its results with the oracle, and the result is never recorded.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from rapid_llm.bench import Device, device_for
from rapid_llm.bench.op_arms import OpArms, op_arms
from rapid_llm.bench.rows import RowComparison, compare
from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import dispatcher, evidence, timing_records
from rapid_llm.kernels.registry.facts import Facts
from rapid_llm.kernels.registry.records import Source
from rapid_llm.kernels.registry.timings import Point, Timing

from .calls import Call

ROUNDS: Final = 20
SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a call. before, after: the row that dispatch chose where every rounding and packed weights are
    allowed. point: None where nothing was measured, and why in `failure`; missing: why rows have no times."""

    call: Call
    before: str
    point: Point | None = None
    after: str = ""
    comparison: RowComparison | None = None
    missing: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    facts: Facts | None = None

    @property
    def regret(self) -> float:
        """By how much the row that dispatch chooses now is slower than the fastest, as a share."""
        return 0.0 if self.point is None else self.point.regret(self.after)

    def json(self) -> dict[str, Any]:
        record: dict[str, Any] = {
            "op": self.call.op,
            "dtype": self.call.dtype,
            "scheme": self.call.scheme,
            "dims": dict(self.call.dims),
            "extras": dict(self.call.extras),
            "before": self.before,
            "after": self.after,
            "missing": self.missing,
            "failure": self.failure,
        }
        if self.comparison is not None and self.point is not None:
            record |= {"order": list(self.point.order), "regret": self.regret, **self.comparison.json()}
        return record


Compare = Callable[..., RowComparison]


def facts_of(call: Call, arguments: Sequence[Any], named: dict[str, Any]) -> Facts:
    """The call's facts where the caller accepts every rounding and packs weights: no row is out for want of these."""
    op = registry.get_op(call.op)
    allow = frozenset(op.numerics.roundings)
    return dispatcher.facts_of(call.op, tuple(arguments), {**named, "allow": allow, "prepack": True})


def measure(
    call: Call,
    device: str,
    *,
    rows: Sequence[str] = (),
    unproven: bool = False,
    rounds: int = ROUNDS,
    max_seconds: float = SECONDS,
    on: Device | None = None,
    run: Compare = compare,
) -> Result:
    """Time the proven rows of a call against the one that dispatch chooses; rows: only these, and that one; with
    `unproven` even if they have no evidence.

    Never raises for what one call does: an op without example arguments, rows that cannot run and figures that the
    harness refuses are told in the result. on, run: stand-ins for the device and the harness.
    """
    try:
        values = call.values(device)
        arms = op_arms(call.op, values)
    except (ValueError, registry.KernelError) as error:
        return Result(call, "", failure=str(error))
    positional = [value for key, value in arms.arguments.items() if isinstance(key, int)]
    named = {key: value for key, value in arms.arguments.items() if isinstance(key, str)}
    facts = facts_of(call, positional, named)
    ranked = [v.row.name for v in dispatcher.settle(facts, None).verdicts]
    known, missing = _proven(arms, facts, set(rows) if unproven else set())
    first = next((name for name in ranked if name in known and name not in missing), None)
    if first is None:
        return Result(call, "", missing=missing, failure="no row of the op has evidence here")
    chosen = [arm for arm in arms.arms if arm.name in known and (not rows or arm.name in rows or arm.name == first)]
    try:
        found = run(
            chosen,
            positional,
            named,
            work=arms.work,
            check=None,
            baseline=first,
            device=on or device_for(device),
            rounds=rounds,
            max_seconds=max_seconds,
        )
    except Exception as error:  # of memory that ends, of a device that fails: one call must not end a long run
        return Result(call, first, missing=missing, failure=f"{type(error).__name__}: {error}")
    missing |= {name: f"refused ({error.code}): {error}" for name, error in found.refused.items()}
    point = point_of(call, facts, found, ranked)
    point = replace(point, rows={name: t for name, t in point.rows.items() if name not in missing})
    return Result(call, first, point, first, found, missing, facts=facts)


def _proven(arms: OpArms, facts: Facts, waived: set[str]) -> tuple[set[str], dict[str, str]]:
    """Names of the arms to time, which have evidence and a source that a record can hold, or are in `waived`; and what
    there is against an arm's being recorded."""
    missing, known = dict(arms.missing), set()
    for arm in arms.arms:
        row = registry.get_row(arm.name)
        proof = evidence.of(row, facts)
        if not proof.verified:
            missing[arm.name] = f"{proof.state}: {proof.text}; run rapid-llm kernels verify {arm.name}"
        elif timing_records.source_of(row) is None:
            missing[arm.name] = "its source cannot be read, so no record could tell when its times are stale"
        if arm.name not in missing or arm.name in waived:
            known.add(arm.name)
    return known, missing


def point_of(call: Call, facts: Facts, found: RowComparison, ranked: Sequence[str]) -> Point:
    """A comparison as a point, with rows in the order that dispatch has them in."""
    if facts.dtype is None:
        raise ValueError(f"{call}: a point needs a dtype")
    rows = {}
    for name, result in found.results.items():
        ratio, spread = found.ratios[name], result.seconds
        figures = (spread.median * 1e6, spread.p10 * 1e6, spread.p90 * 1e6, ratio.median, ratio.low, ratio.high)
        rows[name] = Timing(*figures, flags=result.flags)
    dims = {name: facts.dims[name] for name in timing_records.dims_of(registry.get_op(call.op))}
    return Point(
        op=call.op,
        dtype=facts.dtype,
        scheme=facts.scheme,
        dims=dims,
        rows=rows,
        order=tuple(name for name in ranked if name in rows),
        baseline=found.baseline,
        reach=max(found.control.high - 1, 1 - found.control.low, 0.0),
        label=found.results[found.baseline].label,
        date=datetime.date.today().isoformat(),
        torch=torch.__version__,
    )


def record(results: Sequence[Result], device: str, path: Path) -> list[Result]:
    """Write the points of `results` to a file of records, and tell what dispatch chooses from now on.

    Calls that dispatch cannot tell apart are merged.
    """
    points = [r.point for r in results if r.point is not None]
    sources = {name: _source(name) for p in points for name in p.rows}
    written = {p.key: p for p in timing_records.write(path, device_kind(device), points, sources)}
    dispatcher.forget(None)
    return [r if r.point is None else _settled(r, written[r.point.key]) for r in results]


def _settled(result: Result, point: Point) -> Result:
    found = None if result.facts is None else timing_records.find(result.facts)
    if result.facts is None or found is None or found.point.key != point.key:  # written where nothing reads it
        return replace(result, point=point, after=next(iter(point.order), result.before))
    return replace(result, point=point, after=dispatcher.settle(result.facts, None).row.name)


def device_kind(device: str) -> str:
    """The class of a device; raises `ValueError` where it cannot be looked at."""
    kind, _, index = device.partition(":")
    found = timing_records.device_class(kind, int(index) if index else None)
    if found is None:
        raise ValueError(f"--device {device}: no such device can be used here")
    return found


def _source(name: str) -> Source:
    source = timing_records.source_of(registry.get_row(name))
    if source is None:
        raise ValueError(f"{name}: its source cannot be read")
    return source
