"""Rules of the code base that a reader relies on and that no other tool checks."""

from __future__ import annotations

import ast
import fnmatch
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("rapid_llm", "benchmarks", "tests", "docs", "examples")
MAX_LINES = 400
CLOCKS = {"perf_counter", "perf_counter_ns", "process_time", "process_time_ns", "do_bench"}
CLOCK = "rapid_llm/engine/clock.py"


def _files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def test_files_stay_short() -> None:
    """Catches: two rooms grown into one file."""
    lengths = {_name(path): len(path.read_text().splitlines()) for path in _files(*FOLDERS)}
    long = {name: lines for name, lines in lengths.items() if lines > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines, split them: {long}"


def test_modules_say_what_they_are() -> None:
    """Catches: a module without a docstring."""
    silent = [
        _name(path) for path in _files("rapid_llm") if path.read_text().strip() and not ast.get_docstring(_tree(path))
    ]
    assert not silent, f"no docstring: {silent}"


def test_no_assert_validates() -> None:
    """Catches: a check that vanishes under -O; raise an error with the value and the fix instead."""
    found = [
        f"{_name(path)}:{node.lineno}"
        for path in _files("rapid_llm")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Assert)
    ]
    assert not found, found


def test_one_timing_harness() -> None:
    """Catches: a second timer beside rapid_llm/bench and the engine's one clock."""
    found = [
        f"{_name(path)}:{node.lineno}"
        for path in _files("rapid_llm/kernels", "rapid_llm/models", "rapid_llm/engine", "benchmarks")
        if _name(path) != CLOCK
        for node in ast.walk(_tree(path))
        if (isinstance(node, ast.Attribute) and node.attr in CLOCKS)
        or (isinstance(node, ast.alias) and node.name in CLOCKS)
    ]
    assert not found, found


TIMERS = {"time", "monotonic", "monotonic_ns", "time_ns", "thread_time", "thread_time_ns", "elapsed_time", "timeit"}
TIMER_MODULES = {"time", "timeit", "torch.utils.benchmark", "triton.testing"}


def test_benchmarks_keep_no_timer() -> None:
    """Catches B1: a benchmark that times by itself: a clock, CUDA events, timeit, or another package's harness."""
    found = [
        f"{_name(path)}:{node.lineno}"
        for path in _files("benchmarks")
        for node in ast.walk(_tree(path))
        if _times(node)
    ]
    assert not found, f"time by rapid_llm.bench: {found}"


def _times(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in CLOCKS | TIMERS or (node.attr == "Event" and "cuda" in ast.unparse(node.value))
    if isinstance(node, ast.Import):
        return any(alias.name in TIMER_MODULES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        names = {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        return bool(names & TIMER_MODULES)
    return False


def test_the_rule_on_timers_sees_them() -> None:
    """Catches: a rule that finds nothing because it looks for the wrong thing."""
    sources = (
        *("import time", "from time import sleep", "import timeit", "from torch.utils import benchmark"),
        *("e = torch.cuda.Event(enable_timing=True)", "x.elapsed_time(y)", "triton.testing.do_bench(f)"),
    )
    for source in sources:
        assert any(_times(node) for node in ast.walk(ast.parse(source))), source
    for source in ("bench(f, work=w)", "from rapid_llm.bench import Event", "options.seconds"):
        assert not any(_times(node) for node in ast.walk(ast.parse(source))), source


def test_no_error_is_swallowed() -> None:
    """Catches: a bare `except:`, and an `except Exception` or wider that only passes."""
    found = [
        f"{_name(path)}:{node.lineno}"
        for path in _files("rapid_llm")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ExceptHandler) and _swallows(node)
    ]
    assert not found, found


def _swallows(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    wide = isinstance(handler.type, ast.Name) and handler.type.id in ("Exception", "BaseException")
    return wide and all(isinstance(step, ast.Pass | ast.Continue) for step in handler.body)


def test_pytest_passes_no_folder_of_tests_over(request: pytest.FixtureRequest) -> None:
    """Catches: tests that no run collects, as pytest skips folders called `build` unless told otherwise."""
    passed_over = request.config.getini("norecursedirs")
    folders = {path.parent.relative_to(ROOT) for path in _files("tests") if path.name.startswith("test_")}
    lost = [str(f) for f in folders for part in f.parts if any(fnmatch.fnmatch(part, p) for p in passed_over)]
    assert not lost, lost
