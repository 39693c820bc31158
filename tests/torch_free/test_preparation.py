"""prepare, freeze and thaw: what is built when, by how many at once, and what answers while nothing may be built."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from rapid_llm import kernels
from rapid_llm.kernels import build, dispatch, explain, register
from rapid_llm.kernels.registry import (
    ArgumentError,
    ForcedRowError,
    NoKernelError,
    NotReadyError,
    dispatcher,
    evidence,
    trace,
)
from tests import scratch
from tests.kernels.build import standin

FACTS: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "dims": {"tokens": 4, "hidden": 64}}
KEY = {"op": "scratch", **FACTS}

MODULE = """
DO = {}
CALLS = []

def fast(input, weight, factor=1.0, out=None):
    return "fast"

def slow(input, weight, factor=1.0, out=None):
    return "slow"

def prepare_fast(facts):
    CALLS.append("fast")
    DO.get("fast", lambda: None)()

def prepare_slow(facts):
    CALLS.append("slow")
    DO.get("slow", lambda: None)()
"""


@pytest.fixture
def rows(op: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Proven rows `fast/scratch` and, behind it, `slow/scratch`, both of which build; the module they live in."""
    name = scratch.make_module(tmp_path, "scratch_prepared", MODULE)
    for rank, what in enumerate(("slow", "fast"), 5):
        made = f"{name}:prepare_{what}"
        register(scratch.row(f"{what}/scratch", f"{name}:{what}", prepare=made, available=f"{op}:yes", priority=rank))
        scratch.prove(f"{what}/scratch")
    yield __import__(name)
    kernels.thaw()
    for what in ("slow", "fast"):
        evidence.forget(f"{what}/scratch")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Any) -> standin.StandIn:
    """A compiler that `fast/scratch` is built with, through the build engine."""
    gxx = standin.make(tmp_path / "stand-in")
    unit = standin.unit(standin.sources(tmp_path))
    rows.DO["fast"] = lambda: build.build(unit, gxx.compiler, check=lambda path: None)
    return gxx


def test_rows_are_built_side_by_side(rows: Any) -> None:
    """Catches: builds made one after another: each of the two here ends only once the other has begun."""
    barrier = Barrier(2, timeout=20)

    def build_once() -> None:
        if len(rows.CALLS) <= 2:  # what is built already is only looked up
            barrier.wait()

    rows.DO.update(fast=build_once, slow=build_once)
    seen: list[tuple[str, int, int]] = []
    report = kernels.prepare(
        [dispatch_key("fast"), dispatch_key("slow")],
        jobs=2,
        progress=lambda row, *count: seen.append((row.name, *count)),
    )
    assert report.ok, report
    assert [row.name for row in report.rows] == ["fast/scratch", "slow/scratch"]
    assert seen == [("fast/scratch", 1, 2), ("slow/scratch", 2, 2)]
    assert dispatch("scratch", **FACTS)(1, 2) == "fast"


def dispatch_key(backend: str) -> dict[str, Any]:
    return {**KEY, "backend": backend}


def test_the_report_tells_built_from_cached(compiler: standin.StandIn) -> None:
    """Catches: a second start that builds again, or a report that cannot tell."""
    first = kernels.prepare([KEY])
    dispatcher.forget(None)
    second = kernels.prepare([KEY])
    assert [row.status for report in (first, second) for row in report.rows] == ["built", "cached"]
    assert len(compiler.calls) == 1
    data = json.loads(json.dumps(second.json()))
    assert data["ok"]
    assert data["keys"] == [
        {"op": "scratch", "dtype": "fp32", "dims": {"hidden": 64, "tokens": 4}, "row": "fast/scratch", "text": ""}
    ]
    assert "fast/scratch  cached" in str(second)


def test_a_broken_build_is_reported_and_the_next_row_prepared(rows: Any, compiler: standin.StandIn) -> None:
    """Catches: a prepare() that raises, retries, or leaves the row that will really run unbuilt."""
    compiler.tell("fail")
    report = kernels.prepare([KEY])
    assert [(row.name, row.status) for row in report.rows] == [("fast/scratch", "failed"), ("slow/scratch", "loaded")]
    assert "nonsense" in report.rows[0].text
    assert not report.ok
    assert report.keys[0].row == "slow/scratch"
    assert rows.CALLS == ["fast", "slow", "slow"]
    assert len(compiler.calls) == 1


class UntoldError(Exception):
    """An error whose text is one."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Odd(BaseException):
    """What is no Exception."""


@pytest.mark.parametrize(
    "raised", [SystemExit(3), GeneratorExit(), Odd(), UntoldError()], ids=lambda e: type(e).__name__
)
def test_a_hook_that_ends_the_process_ends_its_row(rows: Any, raised: BaseException) -> None:
    """P34: a foreign row's `prepare` that calls sys.exit, or raises what is no Exception, takes the engine along."""

    def give_up() -> None:
        raise raised

    rows.DO["fast"] = give_up
    report = kernels.prepare([KEY])
    assert [(r.name, r.status) for r in report.rows] == [("fast/scratch", "failed"), ("slow/scratch", "loaded")]
    assert type(raised).__name__ in report.rows[0].text
    assert dispatch("scratch", **FACTS).spec.name == "slow/scratch"


def test_an_interrupt_in_a_hook_is_the_users(rows: Any) -> None:
    """Catches Ctrl-C during a build taken for a failure of the row."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    rows.DO["fast"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        kernels.prepare([KEY])
    rows.DO.clear()
    assert dispatch("scratch", **FACTS).spec.name == "fast/scratch"


def test_prepare_needs_no_network(compiler: standin.StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """P41: a prepare() that fetches anything."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert kernels.prepare([KEY]).ok
    assert len(compiler.calls) == 1


def test_frozen_what_was_prepared_runs_and_nothing_compiles(rows: Any, compiler: standin.StandIn) -> None:
    """P66: a compile after freeze(), or a prepared row that freeze() takes away."""
    kernels.prepare([KEY])
    kernels.freeze()
    assert kernels.frozen()
    before = kernels.compiles()
    for tokens in range(1, 40):
        assert dispatch("scratch", **{**FACTS, "dims": {"tokens": tokens, "hidden": 64}})(1, 2) == "fast"
    assert kernels.compiles() == before
    assert len(compiler.calls) == 1


def test_frozen_an_unbuilt_row_falls_once_and_comes_back(
    rows: Any, compiler: standin.StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a build after freeze(), a silent fall, one sought anew for each call, one that outlives thaw()."""
    rows.DO["slow"] = lambda: raise_(build.FrozenError("slow/scratch is not built"))
    falls = trace.falls().get("scratch", 0)
    kernels.freeze()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            selected = dispatch("scratch", **FACTS)
            assert selected.spec.name == "native/scratch"
    assert rows.CALLS == ["fast", "slow"]
    assert compiler.calls == []
    assert trace.falls()["scratch"] == falls + 1
    assert sorted(r.getMessage().split(";")[1].split()[0] for r in caplog.records) == ["fast/scratch", "slow/scratch"]
    assert {r.code for v in selected.decision.verdicts for r in v.reasons} == {"not_ready"}
    assert kernels.prepare([KEY]).rows[0].status == "refused"
    kernels.thaw()
    assert dispatch("scratch", **FACTS).spec.name == "fast/scratch"
    assert len(compiler.calls) == 1


def raise_(error: Exception) -> None:
    raise error


def test_frozen_and_strict_an_unbuilt_row_is_a_typed_error(
    rows: Any, compiler: standin.StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: strict mode that answers from the floor, or compiles; and a report of it that raises instead."""
    rows.DO["slow"] = lambda: raise_(build.FrozenError("slow/scratch is not built"))
    monkeypatch.setenv("RAPID_LLM_STRICT", "1")
    kernels.freeze()
    with pytest.raises(kernels.FrozenError, match="frozen"):
        dispatch("scratch", **FACTS)
    report = kernels.prepare([KEY])
    assert (report.keys[0].row, report.ok) == (None, False)
    assert "frozen" in report.keys[0].text
    assert explain("scratch", **FACTS).selected is None
    with pytest.raises(ForcedRowError, match="frozen"):
        dispatch("scratch", backend="fast", **FACTS)
    assert compiler.calls == []


def test_a_module_that_builds_on_import_is_not_broken_by_a_freeze(op: str, tmp_path: Path) -> None:
    """Catches: a row out for the life of the process because its module was first imported while frozen."""
    text = """
        from rapid_llm.kernels.build.freezing import check_thawed
        check_thawed("a library")
        def fast(input, weight, factor=1.0, out=None):
            return "fast"
    """
    name = scratch.make_module(tmp_path, "scratch_builds_on_import", text)
    register(scratch.row("fast/scratch", f"{name}:fast", available=f"{op}:yes", priority=5))
    scratch.prove("fast/scratch")
    kernels.freeze()
    try:
        assert dispatch("scratch", **FACTS).spec.name == "native/scratch"
    finally:
        kernels.thaw()
    assert dispatch("scratch", **FACTS).spec.name == "fast/scratch"


def test_keys_come_from_handles_and_models_too(rows: Any) -> None:
    """Catches: a handle whose forced row is forgotten on the way."""
    handle = dispatch("scratch", backend="slow", **FACTS)

    class Model:
        def bindings(self) -> list[tuple[str, str, Any]]:
            return [("1 token", "scratch", handle), ("2 tokens", "scratch", handle)]

    report = kernels.prepare(model=Model())
    assert [(key.op, key.row) for key in report.keys] == [("scratch", "slow/scratch")]
    assert kernels.prepare([handle]).keys == report.keys


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (None, "give keys= or model="),
        (["scratch"], "a mapping with 'op'"),
        ([{**KEY, "tokens": 4}], "unknown fact 'tokens'"),
        ([{"op": "scratch", "kwargs": {"factor": 2.0}}], "kwargs= go with args="),
        ("/nowhere/trace.json", "/nowhere/trace.json is not a trace"),
    ],
)
def test_keys_that_mean_nothing_are_refused(op: str, keys: Any, text: str) -> None:
    """Catches: a misspelt key that prepares nothing, in silence."""
    with pytest.raises(ArgumentError, match=text):
        kernels.prepare(keys)
    with pytest.raises(ArgumentError, match="jobs=0"):
        kernels.prepare([], jobs=0)


HOST_BOUND = """
def pack(weight, scheme):
    return weight
"""


@pytest.fixture
def capture(op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether a graph is captured, as a cell to set; `fast/scratch` does host work per call, on a GPU."""
    name = scratch.make_module(tmp_path, "scratch_packs", HOST_BOUND)
    fields: dict[str, Any] = {"available": f"{op}:yes", "priority": 5, "devices": ("cuda",), "graph_safe": False}
    register(scratch.row("fast/scratch", f"{op}:fast", **fields))
    register(scratch.row("slow/scratch", f"{op}:fast", prepack=f"{name}:pack", **fields))
    scratch.prove("fast/scratch", device="cuda")
    now = [False]
    monkeypatch.setattr(dispatcher, "capturing", lambda: now[0])
    yield now
    evidence.forget("fast/scratch")


GPU_FACTS = {**FACTS, "device": "cuda"}


def test_a_bound_row_that_cannot_be_captured_makes_way(capture: list[bool]) -> None:
    """D6: host work of a bound handle that is baked into a graph; a handle that stays with the floor afterwards."""
    pytest.importorskip("torch", reason="asks torch whether a graph is being captured, or makes a public function")
    handle = dispatch("scratch", **GPU_FACTS)
    assert handle.spec.name == "fast/scratch"
    assert handle(1, 2) == "fast"
    capture[0] = True
    assert handle(1, 2) == "native"
    capture[0] = False
    assert handle(1, 2) == "fast"


def test_a_forced_row_that_cannot_be_captured_is_refused(capture: list[bool]) -> None:
    """D6: a forced row that is swapped for another in silence, or whose weight another row cannot read."""
    pytest.importorskip("torch", reason="asks torch whether a graph is being captured, or makes a public function")
    handle = dispatch("scratch", backend="fast", **GPU_FACTS)
    packed = dispatch("scratch", backend="slow", prepack=True, **GPU_FACTS)
    capture[0] = True
    with pytest.raises(ForcedRowError, match="CUDA graph cannot capture it"):
        handle(1, 2)
    with pytest.raises(ForcedRowError, match="CUDA graph cannot capture it"):
        packed(1, 2)


def test_a_packed_weight_is_given_to_no_other_row(capture: list[bool]) -> None:
    """D6: a weight in one row's form that the floor reads as if it were raw."""
    pytest.importorskip("torch", reason="asks torch whether a graph is being captured, or makes a public function")
    scratch.prove("slow/scratch", device="cuda")
    evidence.forget("fast/scratch")
    try:
        dispatcher.forget(None)
        handle = dispatch("scratch", prepack=True, **GPU_FACTS)
        assert handle.spec.name == "slow/scratch"
        capture[0] = True
        with pytest.raises(NoKernelError, match="does not read the weight that was packed"):
            handle(1, 2)
    finally:
        evidence.forget("slow/scratch")


def test_a_capture_is_no_reason_to_stay_with_the_floor(rows: Any) -> None:
    """P65: a cold row that falls within a capture, and is not asked again after it."""
    rows.DO.update(fast=lambda: raise_(NotReadyError("a graph")), slow=lambda: raise_(NotReadyError("a graph")))
    assert dispatch("scratch", **FACTS).spec.name == "native/scratch"
    rows.DO.clear()
    assert dispatch("scratch", **FACTS).spec.name == "fast/scratch"
