"""Costs of fresh processes, and the command lines of the benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rapid_llm.bench import bench_process, first_call, import_time
from rapid_llm.bench.process import _cumulative_ms
from tests.bench.fakes import FakeClock

ROOT = Path(__file__).resolve().parents[2]


def test_first_call_runs_once_and_is_what_it_took() -> None:
    """Catches: a warm-up before a call that is only interesting cold."""
    clock = FakeClock()
    assert first_call(clock.work(700), clock) == 700
    assert clock.now == 700


def test_import_time_is_the_cumulative_column_of_that_module() -> None:
    """Catches: the self column, the last line, or a module whose name only starts alike."""
    text = "import time: self [us] | cumulative | imported package\nimport time:  10 |  1500 |   a.b\n"
    text += "import time:  20 |  30 |   a.b.c\nimport time:  5 |  9000 | z\n"
    assert _cumulative_ms(text, "a.b") == 1.5
    with pytest.raises(ValueError, match="did not report 'a'"):
        _cumulative_ms(text, "a")


def test_import_time_of_a_real_module() -> None:
    assert 0 < import_time("colorsys", runs=1).min < 1000


def test_a_failing_command_is_an_error_not_a_quick_one() -> None:
    """Catches: a command that dies at once and so wins every comparison."""
    with pytest.raises(subprocess.CalledProcessError):
        bench_process([sys.executable, "-c", "raise SystemExit(3)"], runs=1)


def test_wall_time_covers_the_whole_process() -> None:
    summary = bench_process([sys.executable, "-c", "import time; time.sleep(0.2)"], runs=1)
    assert summary.min >= 200


def test_the_dispatch_benchmark_measures_every_kind_of_call() -> None:
    """Catches: a benchmark that no longer runs. In a process of its own, since it registers scratch ops."""
    code = (
        "import json\n"
        "from benchmarks import dispatch\n"
        "from rapid_llm.bench import Run\n"
        "run = Run('x', force_busy=True)\n"
        "dispatch.calls(run, blocks=3)\n"
        "print(json.dumps([f.json() for f in run.figures]))\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for a busy machine are refused
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    figures = {figure["name"]: figure for figure in json.loads(done.stdout)}
    assert set(figures) >= {
        "look-up with a ready key",
        "bound call",
        "public call, two tensors",
        "public call, six tensors",
    }
    assert all(figure["at_most"] > 0 for figure in figures.values())
    assert figures["bound call"]["value"] < figures["public call, two tensors"]["value"]


@pytest.mark.parametrize("module", ["dispatch", "smollm2_cpu"])
def test_benchmarks_explain_themselves(module: str) -> None:
    """Catches: an option that every benchmark promises and one lacks."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for option in ("--force-busy", "--results", "--quick"):
        assert option in done.stdout
