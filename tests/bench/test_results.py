"""Figures, verdicts and result files."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rapid_llm.bench import Figure, MachineBusyError, Run, print_figures, result_path, summarise, write_json
from rapid_llm.bench import results as results_module
from rapid_llm.bench.load import Load


@given(st.lists(st.floats(-1e100, 1e100), min_size=1))
def test_min_median_max_are_in_order(samples: list[float]) -> None:
    """Catches B30: the largest reported as the smallest, or samples dropped in silence."""
    summary = summarise(samples)
    assert summary.min <= summary.median <= summary.max
    assert (summary.count, summary.min, summary.max) == (len(samples), min(samples), max(samples))


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf]])
def test_samples_that_are_none_are_refused(samples: list[float]) -> None:
    """Catches: `max(0.0, nan)`, which turns a broken sample into a good one."""
    with pytest.raises(ValueError):
        summarise(samples)


@pytest.mark.parametrize(
    ("value", "target", "met"),
    [
        (0.3, {"at_most": 0.3}, True),
        (0.31, {"at_most": 0.3}, False),
        (2.0, {"at_least": 2.0}, True),
        (1.99, {"at_least": 2.0}, False),
        (0.0, {"at_least": 0.0}, True),
        (1.2, {"at_least": 0.95, "at_most": 1.05}, False),
        (1.0, {}, None),
    ],
)
def test_verdicts(value: float, target: dict[str, float], met: bool | None) -> None:
    """Catches: a verdict turned round, a target of 0 read as none, one of two targets forgotten."""
    figure = Figure("f", value, "us", **target)
    assert figure.met is met
    assert {k: figure.json()[k] for k in target} == target


def test_a_figure_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="'f': nan"):
        Figure("f", math.nan, "us", at_least=0.0)


def _run(monkeypatch: pytest.MonkeyPatch, before: float, during: float, **options: bool) -> Run:
    """A run on a machine where others used `before` and then `during` CPUs."""

    class Watch:
        def stop(self) -> Load:
            return Load(3.0, during, 1, None)

    def idle(*, force: bool, patience: float) -> Load:
        if before > 0.15 and not force:
            raise MachineBusyError("busy")
        return Load(0.5, before, 1, None)

    monkeypatch.setattr(results_module, "require_idle", idle)
    monkeypatch.setattr(results_module, "LoadWatch", Watch)
    return Run("name", threads_checked=False, **options)


def test_a_run_refuses_a_busy_machine_unless_forced_and_then_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: --force-busy that leaves no trace in the result."""
    with pytest.raises(MachineBusyError):
        _run(monkeypatch, 0.9, 0.9)
    record = _run(monkeypatch, 0.9, 0.9, force_busy=True).record()
    assert record["force_busy"] is True
    assert record["disturbed"] is True
    assert record["load"]["before"]["others"] == 0.9


def test_a_neighbour_that_starts_midway_marks_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: load looked at only before the run."""
    assert _run(monkeypatch, 0.0, 0.5).record()["disturbed"] is True
    assert _run(monkeypatch, 0.0, 0.05).record()["disturbed"] is False


def test_the_record_and_the_table_hold_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    run = _run(monkeypatch, 0.0, 0.5)
    run.add(Figure("look-up", 0.25, "us", at_most=0.3, detail={"blocks": 20}))
    run.add(Figure("call", 1.5, "us", at_most=1.0))
    assert [figure.name for figure in run.missed] == ["call"]
    record = run.record()
    assert [f["name"] for f in record["figures"]] == ["look-up", "call"]
    assert record["figures"][0]["detail"] == {"blocks": 20}
    text = io.StringIO()
    print_figures("title", run.figures, record, Console(file=text, width=120))
    shown = text.getvalue()
    for part in ("look-up", "<= 0.3", "met", "missed", "DISTURBED"):
        assert part in shown


def test_files_are_whole_or_absent(tmp_path: Path) -> None:
    """Catches: a half-written result after an error, and NaN in a file that JSON readers then refuse."""
    path = tmp_path / "deep" / "r.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError):
        write_json(path, {"a": math.nan})
    with pytest.raises(TypeError, match="has no JSON form"):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


def test_result_files_are_named_after_benchmark_and_machine(tmp_path: Path) -> None:
    path = result_path("smollm2 cpu", tmp_path)
    assert path.parent == tmp_path
    assert path.name.startswith("smollm2-cpu-")
    assert path.suffix == ".json"
