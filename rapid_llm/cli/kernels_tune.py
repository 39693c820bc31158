"""`rapid-llm kernels tune`: tiles of native Triton kernels, searched, proven and kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rapid_llm.platform import has_nvidia

from .kernels_bench import calls_of
from .support import BAD, USAGE, fail, print_json, usage

if TYPE_CHECKING:
    from rapid_llm.tuning.tune import Outcome


def tune(
    ops: Sequence[str],
    *,
    trace: Path | None,
    model: str | None,
    dims: Sequence[str],
    dtypes: Sequence[str],
    schemes: Sequence[str],
    device: str | None,
    quick: bool,
    seconds: float,
    write: str,
    json: bool,
) -> None:
    """Search, print, and record if asked; status 1 if no call could be tuned."""
    from rapid_llm.tuning import session
    from rapid_llm.tuning import tune as tuning

    where = device or ("cuda" if has_nvidia() else "cpu")
    selection = session.select(ops)
    if selection.rows:
        fail(f"{selection.rows[0]} is a row; tiles are those of an op's native rows: give the op", USAGE)
    with usage():
        calls = calls_of(selection, trace, model, dims, dtypes, schemes, where, quick)
        path = tuning.target(write, where)
    if not calls:
        fail("no call to tune for: the trace or model makes none of the ops named", USAGE)
    outcomes: list[Outcome] = []
    for outcome in tuning.tune(calls, where, path=path, seconds=seconds):
        outcomes.append(outcome)
        if not json:
            _show(outcome)
    kept = sum(found.best is not None for outcome in outcomes for found in outcome.found)
    if json:
        report: dict[str, Any] = {"kept": kept, "written": None if path is None or not kept else str(path)}
        print_json({**report, "results": [outcome.json() for outcome in outcomes]})
    else:
        print(f"{kept} tiles better than the heuristics" + (f", written to {path}" if path and kept else ""))
    if all(outcome.failure for outcome in outcomes):
        raise typer.Exit(BAD)


def _show(outcome: Outcome) -> None:
    if outcome.failure:
        print(f"{outcome.call}: not tuned: {outcome.failure}")
    for found in outcome.found:
        best, out = found.best, [trial for trial in found.tried if trial.failure]
        print(f"{found.question}: {len(found.tried)} candidates, {len(out)} out; {found.text}")
        if best is not None and best.timing is not None:
            print(
                f"  {_plain(best.meta)} instead of {_plain(found.question.stated)}: {best.timing.ratio:.3f} of the time"
            )
        for trial in out:
            print(f"  {_plain(trial.meta)}: {trial.failure.splitlines()[0]}")


def _plain(meta: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in meta.items())
