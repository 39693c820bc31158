"""A verification run: which rows, in several processes, what came of it, and the records that it makes.

A row's dtype is proven where every case of the full set that the row takes was right, something was compared, and the
wrong rows of `mutants` met the same cases and were refused. Anything less makes no record, and a failure takes the
record there was away. A record is of the source as it was before the run; a row that was edited meanwhile gets none.
What an interrupted run proved is proven; of what it did not come to, nothing changes.
"""

from __future__ import annotations

import datetime
import platform as _python
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import KernelSpec, evidence, plugins, records
from rapid_llm.kernels.registry.digest import source_of
from rapid_llm.kernels.registry.facts import Facts
from rapid_llm.verify import mutants, pool, proving
from rapid_llm.verify.conformance import unavailable, variants
from rapid_llm.verify.proving import Outcome, Task

LIMIT_S: Final = 300.0
"""A task that takes longer hangs."""

_SLOW: Final = ("attention.prefill", "attention.decode", "attention.mla_decode", "sample", "linear")
"""Ops whose tasks take longest; they start first."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A row that was not run, and why."""

    row: str
    why: str


@dataclass(slots=True)
class Verification:
    """What a run is to do, and what it found. interrupted: it has not done all. `ok`: something was proven and nothing
    was wrong."""

    device: str
    kind: str
    budget: str
    tasks: list[Task] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    scores: dict[tuple[object, ...], Outcome] = field(default_factory=dict)
    sources: dict[str, records.Source | None] = field(default_factory=dict)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        return bool(self.outcomes) and all(not self.lacks(o) for o in self.outcomes)

    def score_of(self, outcome: Outcome) -> Outcome | None:
        """What became of the wrong rows on the cases of an outcome's row."""
        return self.scores.get(_key(outcome.task.row))

    def lacks(self, outcome: Outcome) -> str:
        """Why an outcome of a row is no proof; "" where it is one."""
        if outcome.status != "ok":
            return outcome.text
        if outcome.task.budget != "full":
            return ""  # a look, which nobody takes for a proof
        score = self.score_of(outcome)
        if score is None or score.score.tried == 0:
            return "no wrong rows were tried on its cases" + (f": {score.text}" if score is not None else "")
        if score.score.critical_alive:
            return f"its cases do not refuse wrong rows: {', '.join(score.score.critical_alive)}"
        if not score.score.enough:
            return f"only {score.score.tried} wrong rows were tried on its cases, {mutants.ENOUGH} are needed"
        return ""


def plan(
    names: Sequence[str],
    *,
    device: str,
    dtypes: Sequence[str] = (),
    budget: str = "full",
    stale_only: bool = False,
) -> Verification:
    """Every row of `names` (rows, ops or backends; all if empty) that can run on `device`, in each dtype and scheme.

    Raises `ValueError` for a name or dtype that is none.
    """
    plugins.scan()
    kind = records.device_class(torch.device(device).type, torch.device(device).index)
    if kind is None:
        raise ValueError(f"{device}: torch sees no such device here")
    found = Verification(device, kind, budget)
    seen: set[tuple[object, ...]] = set()
    for row in _rows(names):
        op = registry.get_op(row.op)
        why = unavailable(row, device)
        if why:
            found.skips.append(Skip(row.name, why))
            continue
        pairs = [p for p in variants(op, row) if not dtypes or p[0] in dtypes]
        if stale_only:
            pairs = [p for p in pairs if not _recorded(row, device, *p)]
        found.tasks += [Task("row", op.id, row.name, device, d, s, budget) for d, s in pairs]
        found.sources[row.name] = source_of(row, op)
        key = mutants.key(op, row)
        if pairs and budget == "full" and key not in seen:
            seen.add(key)
            found.tasks.append(Task("mutants", op.id, row.name, "cpu", budget=budget))
    found.tasks.sort(key=_order)
    return found


def execute(
    run: Verification, *, jobs: int, limit_s: float = LIMIT_S, told: Callable[[Outcome, int], None] | None = None
) -> None:
    """Do the tasks of `run` in `jobs` processes, or in this one if 0; `told(outcome, how many are done)` after each.

    Whatever is raised meanwhile, a `KeyboardInterrupt` among it, leaves the outcomes so far, for `save`.
    """
    started = time.perf_counter()
    results: Iterable[Any] = (
        pool.run(run.tasks, proving.work, proving.start, jobs=jobs, limit_s=limit_s)
        if jobs
        else map(proving.attempt, run.tasks)
    )
    run.interrupted = True
    for count, result in enumerate(results, 1):
        outcome = result
        if isinstance(result, pool.Lost):
            outcome = Outcome(result.task, "failed", result.why, result.seconds)
        if outcome.task.kind == "mutants":
            run.scores[_key(outcome.task.row)] = outcome
        else:
            run.outcomes.append(outcome)
        if told is not None:
            told(outcome, count)
    run.interrupted = False
    run.outcomes.sort(key=lambda o: (o.task.op, o.task.row, o.task.dtype, str(o.task.scheme)))
    run.seconds = time.perf_counter() - started


def save(run: Verification, to: str) -> tuple[Path, int, dict[str, str]]:
    """Write the proofs of `run` to `user`, `shipped`, a `.json` file or a folder.

    Returns the file, how many proofs went into it, and the rows that were proven and got no record, with why.
    """
    if to in (records.USER, records.SHIPPED):
        path = records.folder(to) / records.file_name(run.kind)
    else:
        path = Path(to) if to.endswith(".json") else Path(to) / records.file_name(run.kind)
    proofs: dict[str, dict[str, records.Proof]] = {}
    gone: dict[str, set[str]] = {}
    left: dict[str, str] = {}
    for outcome in run.outcomes:
        task = outcome.task
        if run.interrupted and outcome.status == "ok" and task.budget == "full" and run.score_of(outcome) is None:
            left[task.row] = "the run was interrupted before wrong rows were tried on its cases"
            continue
        if outcome.status == "failed" or (task.budget == "full" and run.lacks(outcome)):
            gone.setdefault(task.row, set()).add(records.proof_key(task.dtype, task.scheme))
            continue
        why = _no_record(run, outcome)
        if why:
            left[task.row] = why
            continue
        proofs.setdefault(task.row, {})[records.proof_key(task.dtype, task.scheme)] = _proof(run, outcome)
    new: dict[str, records.Record] = {}
    for row, kept in proofs.items():
        source = run.sources[row]
        if source is not None:
            new[row] = records.Record(source, kept)
    if new or gone:
        records.write(path, run.kind, new, gone)
        evidence.reload()
    return path, sum(len(r.proofs) for r in new.values()), left


def _no_record(run: Verification, outcome: Outcome) -> str:
    """Why an outcome that is right makes no record, or ""."""
    if outcome.task.budget != "full":
        return "a quick run is no proof"
    if outcome.interpreted:
        return "Triton's interpreter ran it, which proves nothing about a device"
    row = registry.get_row(outcome.task.row)
    before, now = run.sources.get(row.name), source_of(row, registry.get_op(row.op))
    if before is None or now is None:
        return "its source cannot be read, so no record could go stale"
    if (before.digest, before.extension) != (now.digest, now.extension):
        return "its source was edited during the run"
    return ""


def _proof(run: Verification, outcome: Outcome) -> records.Proof:
    score = run.scores[_key(outcome.task.row)].score
    return records.Proof(
        cases=outcome.cases,
        calls=outcome.calls,
        elements=outcome.elements,
        seeds=outcome.seeds,
        worst_ulp=_short(outcome.worst_ulp),
        worst_ratio=_short(outcome.worst_ratio),
        mutants=score.killed,
        of=score.tried,
        torch=str(torch.__version__),
        toolchain=toolchain(run.device),
        worst_norm=_short(outcome.worst_norm),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def toolchain(device: str) -> str:
    """What compiled the code that ran, as far as one line can say."""
    parts = [f"Python {_python.python_version()}"]
    if device.startswith("cuda"):
        parts.append(f"CUDA {torch.version.cuda}")
        try:
            import triton

            parts.append(f"Triton {triton.__version__}")
        except ImportError:
            parts.append("no Triton")
    return ", ".join(parts)


def as_json(run: Verification) -> dict[str, object]:
    """The whole run as plain data."""
    return {
        "device": run.device,
        "class": run.kind,
        "budget": run.budget,
        "seconds": round(run.seconds, 1),
        "ok": run.ok,
        "rows": [_entry(run, outcome) for outcome in run.outcomes],
        "mutants": [
            {
                "op": o.task.op,
                "cases_of": o.task.row,
                "tried": o.score.tried,
                "killed": o.score.killed,
                "alive": list(o.score.alive),
                "seconds": round(o.seconds, 2),
                "problem": "" if o.status == "ok" else o.text,
            }
            for o in run.scores.values()
        ],
        "skipped": [{"row": s.row, "why": s.why} for s in run.skips],
    }


def _entry(run: Verification, outcome: Outcome) -> dict[str, object]:
    task, why = outcome.task, run.lacks(outcome)
    return {
        "row": task.row,
        "op": task.op,
        "dtype": task.dtype,
        "scheme": task.scheme,
        "ok": not why,
        "problem": why,
        "cases": outcome.cases,
        "skipped": outcome.skipped,
        "refused": outcome.refused,
        "calls": outcome.calls,
        "elements": outcome.elements,
        "worst_ulp": _short(outcome.worst_ulp),
        "worst_ratio": _short(outcome.worst_ratio),
        "worst_norm": _short(outcome.worst_norm),
        "seconds": round(outcome.seconds, 2),
        "failures": list(outcome.failures),
    }


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _rows(names: Sequence[str]) -> list[KernelSpec]:
    every = [row for op in registry.ops() for row in registry.rows(op.id)]
    if not names:
        return every
    found: dict[str, KernelSpec] = {}
    for name in names:
        some = [row for row in every if name in (row.name, row.op, row.backend)]
        if not some:
            known = [*(row.name for row in every), *(op.id for op in registry.ops())]
            raise ValueError(f"no row, op or backend {name!r}{registry.registry.nearest_hint(name, known)}")
        found |= {row.name: row for row in some}
    return list(found.values())


def _recorded(row: KernelSpec, device: str, dtype: str, scheme: str | None) -> bool:
    where = torch.device(device)
    return evidence.of(row, Facts(row.op, where.type, where.index, dtype=dtype, scheme=scheme)).state == "record"


def _key(row_name: str) -> tuple[object, ...]:
    row = registry.get_row(row_name)
    return mutants.key(registry.get_op(row.op), row)


def _order(task: Task) -> tuple[object, ...]:
    slow = _SLOW.index(task.op) if task.op in _SLOW else len(_SLOW)
    # Without its wrong rows a row is not proven: they come first, so that an interrupted run has proven what it ran.
    return (slow, task.kind != "mutants", "native" not in task.row, task.row, task.dtype)


def summary(run: Verification) -> Mapping[str, int]:
    """How many outcomes are proven, wrong, and not run."""
    wrong = sum(bool(run.lacks(o)) for o in run.outcomes)
    return {"right": len(run.outcomes) - wrong, "wrong": wrong, "skipped": len(run.skips)}
