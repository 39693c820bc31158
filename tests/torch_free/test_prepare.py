"""Rows whose code is built before they are chosen: built once, out for good if broken, passed over if not now."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rapid_llm.kernels import dispatch, explain, register
from rapid_llm.kernels.build import FrozenError
from rapid_llm.kernels.registry import (
    ForcedRowError,
    NotReadyError,
    RegistrationError,
    StrictFallbackError,
    dispatcher,
    evidence,
    probes,
)
from tests import scratch

FACTS: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "dims": {"tokens": 4, "hidden": 64}}

MODULE = """
from rapid_llm.kernels.registry import KernelError, NotReadyError

CALLS = []
FAILURE = []

def fast(input, weight, factor=1.0, out=None):
    return "built"

def prepare(facts):
    CALLS.append(facts.dtype)
    if FAILURE:
        raise FAILURE[0]

def available():
    return False

def why_not():
    return "the compiler is on holiday"
"""


@pytest.fixture
def built(op: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A proven row `fast/scratch` that prepares; the module that it lives in."""
    monkeypatch.setattr(dispatcher, "_warned", set())  # what another test was told is told again
    name = scratch.make_module(tmp_path, "scratch_built", MODULE)
    register(
        scratch.row("fast/scratch", f"{name}:fast", prepare=f"{name}:prepare", available=f"{op}:yes", priority=5),
    )
    scratch.prove("fast/scratch")
    module = __import__(name)
    yield module
    evidence.forget("fast/scratch")


def test_a_row_is_built_at_the_decision_and_not_again(built: Any) -> None:
    """Catches: a build left to the first call, or repeated for every call of the same facts."""
    assert dispatch("scratch", **FACTS)(1, 2) == "built"
    assert built.CALLS == ["fp32"]
    dispatch("scratch", **FACTS)
    assert built.CALLS == ["fp32"]
    dispatch("scratch", **{**FACTS, "dtype": "bf16"}, backend="fast")
    assert built.CALLS == ["fp32", "bf16"]


def test_a_broken_build_is_out_with_one_warning_and_the_floor_answers(
    built: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a failed build that reaches the caller, is tried again at every call, or is said twice or never."""
    built.FAILURE.append(built.KernelError("fast/scratch does not compile: a.cu:3\n  log: /somewhere/a.log"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert dispatch("scratch", **FACTS).spec.name == "native/scratch"
        dispatcher.forget(None)
        assert dispatch("scratch", **FACTS).spec.name == "native/scratch"
    assert built.CALLS == ["fp32"]
    assert [r.getMessage().count("/somewhere/a.log") for r in caplog.records] == [1]
    (reason,) = explain("scratch", **FACTS).json()["rows"][1]["reasons"]  # type: ignore[index]
    assert reason["code"] == "broken"
    assert "a.cu:3" in reason["text"]


def test_forced_or_strict_a_broken_build_raises_with_its_log(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a row named by the user, or strict mode, that falls to the floor although its build broke."""
    built.FAILURE.append(RuntimeError("no room; log: /somewhere/b.log"))
    with pytest.raises(ForcedRowError, match=r"RuntimeError: no room; log: /somewhere/b\.log"):
        dispatch("scratch", backend="fast/scratch", **FACTS)
    monkeypatch.setenv("RAPID_LLM_STRICT", "1")
    with pytest.raises(StrictFallbackError, match=r"/somewhere/b\.log"):
        dispatch("scratch", **FACTS)


def test_a_row_that_cannot_be_built_now_is_taken_later(built: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Catches (P65): a choice made in a capture, or frozen, that sticks to the floor for ever."""
    built.FAILURE.append(NotReadyError("a CUDA graph is being captured"))
    with caplog.at_level(logging.WARNING):
        decision = dispatch("scratch", **FACTS).decision
        assert (decision.row.name, decision.lasting) == ("native/scratch", False)
        dispatch("scratch", **FACTS)
    assert [r.getMessage() for r in caplog.records] == [
        "scratch runs on its floor; fast/scratch is out: a CUDA graph is being captured"
    ]
    assert decision.verdicts[1].reasons[0].code == "not_ready"
    built.FAILURE.clear()
    assert dispatch("scratch", **FACTS).spec.name == "fast/scratch"


@pytest.mark.parametrize("kind", [NotReadyError, FrozenError])
def test_forced_or_strict_a_row_that_cannot_be_built_now_is_a_typed_error(
    built: Any, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a forced row, or strict mode, that answers from the floor while compiling is forbidden."""
    built.FAILURE.append(kind("kernels are frozen"))
    with pytest.raises(ForcedRowError, match="kernels are frozen"):
        dispatch("scratch", backend="fast", **FACTS)
    monkeypatch.setenv("RAPID_LLM_STRICT", "1")
    with pytest.raises(kind, match="kernels are frozen"):
        dispatch("scratch", **FACTS)
    assert explain("scratch", **FACTS).selected is None
    built.FAILURE.clear()
    assert dispatch("scratch", **FACTS).spec.name == "fast/scratch"


def test_prepare_is_checked_like_every_other_field(op: str) -> None:
    """Catches: a malformed field that only fails at dispatch, and a floor that would have to be built."""
    with pytest.raises(RegistrationError, match="prepare"):
        scratch.row("fast/scratch", f"{op}:fast", prepare="prepare")
    with pytest.raises(RegistrationError, match="nothing to prepare"):
        scratch.row("native/scratch", f"{op}:native", prepare=f"{op}:yes")


def test_a_probe_that_answers_false_is_asked_why_not(built: Any) -> None:
    """Catches: `explain()` that says no more than "returned False" although the probe knows the reason."""
    assert probes.check("scratch_built:available").text == "the compiler is on holiday"
    assert probes.call_here("scratch_built:available").text == "the compiler is on holiday"
