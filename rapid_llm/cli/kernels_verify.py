"""`rapid-llm kernels verify`: prove rows on this machine, and keep the proofs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rapid_llm.platform import default_threads, has_nvidia

from .support import BAD, fail, print_json, print_table, usage

if TYPE_CHECKING:
    from rapid_llm.verify.proving import Outcome
    from rapid_llm.verify.verification import Verification


def verify(
    names: Sequence[str],
    *,
    device: str | None,
    dtypes: Sequence[str],
    quick: bool,
    stale: bool,
    write: str,
    jobs: int | None,
    limit: float,
    json: bool,
) -> None:
    """Run the conformance suite over rows; status 1 if one is wrong, or if nothing was proven."""
    from rapid_llm.verify import verification as v

    where = device or ("cuda" if has_nvidia() else "cpu")
    if write != "none" and quick:
        write = "none"
    with usage():
        run = v.plan(names, device=where, dtypes=dtypes, budget="interpret" if quick else "full", stale_only=stale)
    if not run.tasks:
        _nothing(run, stale, json)
        return
    workers = default_threads() if jobs is None else jobs
    print(f"{run.kind}: {len(run.tasks)} tasks in {max(workers, 1)} processes", file=sys.stderr)
    try:
        with _interrupted_by_termination():
            v.execute(run, jobs=workers, limit_s=limit, told=lambda outcome, done: _progress(run, outcome, done))
    except KeyboardInterrupt:
        if write != "none" and run.outcomes:
            kept, proofs, _ = v.save(run, write)
            print(f"interrupted: {proofs} proofs written to {kept}", file=sys.stderr)
        raise
    path, proofs, left = (None, 0, {}) if write == "none" else v.save(run, write)
    if json:
        written = None if path is None else {"file": str(path), "proofs": proofs, "without": left}
        print_json({**v.as_json(run), "written": written})
    else:
        _show(run)
        for row, why in left.items():
            print(f"{row}: no record: {why}")
        if path is not None:
            print(f"{proofs} proofs written to {path}")
    if not run.ok:
        raise typer.Exit(BAD)


def replay_file(path: Path, *, device: str | None, json: bool) -> None:
    """Make a saved call again; status 1 if it is still wrong."""
    from dataclasses import asdict

    from rapid_llm.verify.replay import load, replay

    with usage():
        saved = load(path)
    report = replay(saved, device)
    if json:
        print_json({**asdict(report), "ok": report.ok, "saved": saved.failure})
    else:
        print(f"saved: {saved.failure}")
        print(f"now: {report}")
    if not report.ok:
        raise typer.Exit(BAD)


def activations(model: str, *, device: str | None, json: bool) -> None:
    """Record what a model feeds its ops, and make those calls by every row; status 1 if one is wrong."""
    from rapid_llm.engine.llm import LLM
    from rapid_llm.verify.recorder import by_every_row, recording

    with recording() as kept:
        llm = LLM(model, device=device or "auto")
        llm.generate(["The capital of France is", "def fibonacci(n):\n    "], None)
    reports = [r for r in by_every_row(kept.calls) if r.cases]
    wrong = [r for r in reports if not r.ok]
    if json:
        rows = [{"row": r.row, "dtype": r.dtype, "ok": r.ok, "worst_ratio": r.worst_ratio} for r in reports]
        print_json({"calls": len(kept.calls), "ok": not wrong and bool(reports), "rows": rows})
    else:
        worst = {(r.row, r.dtype, r.scheme or ""): 0.0 for r in reports}
        for r in reports:
            worst[r.row, r.dtype, r.scheme or ""] = max(worst[r.row, r.dtype, r.scheme or ""], r.worst_ratio)
        print_table(("row", "dtype", "scheme", "of bound"), [(*k, f"{v:.3g}") for k, v in worst.items()])
        for r in wrong:
            print(r)
        print(f"{len(kept.calls)} recorded calls, made {len(reports)} times by all rows, {len(wrong)} wrong")
    if wrong or not reports:
        raise typer.Exit(BAD)


@contextmanager
def _interrupted_by_termination() -> Iterator[None]:
    """SIGTERM, which `timeout` sends, ends the run as Ctrl-C does: with what was proven."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _nothing(run: Verification, stale: bool, json: bool) -> None:
    """No task: because all is proven, or because no row can run."""
    if json:
        from rapid_llm.verify.verification import as_json

        print_json({**as_json(run), "ok": stale, "written": None})
    for skip in [] if json else run.skips:
        print(f"{skip.row}: {skip.why}")
    if not stale:
        fail(f"none of these rows can run on {run.device}")
    if not json:
        print(f"every row that can run on {run.kind} is proven")


def _progress(run: Verification, outcome: Outcome, done: int) -> None:
    word = {"ok": "ok", "failed": "WRONG", "nothing": "nothing"}[outcome.status]
    if outcome.task.kind == "mutants":
        told = f"{outcome.score.killed} of {outcome.score.tried} refused"
    else:
        told = f"{outcome.cases} cases, {outcome.worst_ratio:.2g} of the bound"
    text = f"  {outcome.text[:200]}" if outcome.status != "ok" else ""
    width = len(str(len(run.tasks)))
    print(
        f"[{done:>{width}}/{len(run.tasks)}] {word:<7} {outcome.task}: {told}, {outcome.seconds:.1f} s{text}",
        file=sys.stderr,
        flush=True,
    )


def _show(run: Verification) -> None:
    from rapid_llm.verify.verification import summary

    headings = ("row", "dtype", "verdict", "cases", "worst ulp", "of bound", "refused", "s")
    print_table(headings, [_line(run, outcome) for outcome in run.outcomes])
    for outcome in run.outcomes:
        if why := run.lacks(outcome):
            print(f"\n{outcome.task}: {why}")
            for failure in outcome.failures:
                print(f"  {failure}")
    for skip in run.skips:
        print(f"not run: {skip.row}: {skip.why}")
    counts = summary(run)
    print(f"\n{run.kind}: {counts['right']} right, {counts['wrong']} wrong, {counts['skipped']} rows not run")


def _line(run: Verification, outcome: Outcome) -> tuple[Any, ...]:
    task = outcome.task
    score = run.score_of(outcome)
    refused = "" if score is None else f"{score.score.killed}/{score.score.tried}"
    verdict = "right" if not run.lacks(outcome) else "WRONG" if outcome.status == "failed" else "not proven"
    dtype = " ".join(filter(None, (task.dtype, task.scheme)))
    ulp, ratio = f"{outcome.worst_ulp:.3g}", f"{outcome.worst_ratio:.3g}"
    return (task.row, dtype, verdict, outcome.cases, ulp, ratio, refused, f"{outcome.seconds:.1f}")
