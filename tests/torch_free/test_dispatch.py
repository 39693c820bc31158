"""Filter, rank, force, explain: equal inputs give equal choices, and a row that is out says why and how to get in."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from rapid_llm.kernels import UNMEASURED, Dim, GoldenRecord, KernelSpec, Shape, dispatch, explain, register, use_backend
from rapid_llm.kernels.registry import (
    ArgumentError,
    ForcedRowError,
    RegistrationError,
    StrictFallbackError,
    UnknownOpError,
    UnknownRowError,
    overrides,
    registry,
    trace,
)
from tests import scratch

FACTS: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "dims": {"tokens": 4, "hidden": 64}}


def add(module: str, name: str = "fast/scratch", *, proven: bool = True, **changes: Any) -> None:
    register(scratch.row(name, f"{module}:fast", **{"priority": 5, **changes}))
    if proven:
        scratch.prove(name)


def reason(name: str, **facts: Any) -> dict[str, str]:
    rows = explain("scratch", **{**FACTS, **facts}).json()["rows"]
    (only,) = next(r for r in rows if r["name"] == name)["reasons"]
    return only


def test_the_best_admitted_row_is_chosen(op: str) -> None:
    add(op)
    selected = dispatch("scratch", **FACTS)
    assert selected.spec.name == "fast/scratch"
    assert selected(1, 2) == "fast"
    assert selected.func.__name__ == "fast"


def test_a_row_registered_after_the_first_decision_is_seen(op: str) -> None:
    assert dispatch("scratch", **FACTS).spec.name == "native/scratch"
    add(op)
    assert dispatch("scratch", **FACTS).spec.name == "fast/scratch"


def test_unverified_rows_are_out_unless_named(op: str) -> None:
    """A golden record is a claim of the row about itself and admits nothing."""
    add(op, proven=False, golden=GoldenRecord(verified=True, max_abs_diff=0.0, baseline="native/scratch"))
    assert dispatch("scratch", **FACTS).spec.name == "native/scratch"
    assert reason("fast/scratch")["code"] == "unverified"
    assert dispatch("scratch", backend="fast", **FACTS).spec.name == "fast/scratch"
    assert "unverified" in str(explain("scratch", backend="fast", **FACTS).json()["rows"][0]["evidence"])


def test_unmeasured_rows_lose_ties(op: str) -> None:
    add(op, priority=UNMEASURED)
    assert dispatch("scratch", **FACTS).spec.name == "native/scratch"


def test_a_preference_ranks_and_a_requirement_filters(op: str) -> None:
    add(op, shape=Shape(prefer=(Dim("tokens", max=8),)), priority=0)
    assert dispatch("scratch", **FACTS).spec.name == "fast/scratch"
    assert dispatch("scratch", **{**FACTS, "dims": {"tokens": 9, "hidden": 64}}).spec.name == "native/scratch"
    assert explain("scratch", **{**FACTS, "dims": {"tokens": 9}}).rows[1].admitted


@pytest.mark.parametrize(
    ("changes", "facts", "code", "fix"),
    [
        ({"devices": ("cuda",)}, {}, "device", "move the tensors to cuda"),
        ({"capability": ((90, None),)}, {}, "device", "move the tensors to cuda"),
        ({"dtypes": ("fp16",)}, {}, "dtype", "convert to fp16"),
        ({"dtypes": ("fp32",)}, {"dtype": "fp16"}, "dtype", "convert to fp32"),
        ({"shape": Shape(require=(Dim("hidden", multiple_of=128),))}, {}, "shape", "a multiple of 128"),
        ({"shape": Shape(require=(Dim("numel", max=2**31 - 1),))}, {"dims": {"numel": 2**31}}, "shape", "2147483647"),
        ({"shape": Shape(require=(Dim("tokens", min=1),))}, {"dims": {}}, "not_given", "give dims="),
        ({"layout": ("contiguous",)}, {"layout": ()}, "layout", "make every tensor contiguous"),
        ({"layout": ("weight:aligned16",)}, {"layout": ()}, "layout", "make weight aligned to 16 bytes"),
        ({"graph_safe": False}, {"capturing": True}, "graph", "outside the capture"),
        ({"prepack": "m:pack"}, {}, "prepack", "prepack=True"),
    ],
)
def test_each_filter_says_what_would_admit_the_row(op: str, changes: Any, facts: Any, code: str, fix: str) -> None:
    add(op, **changes)
    scratch.prove("fast/scratch", dtype="fp16")
    found = reason("fast/scratch", **facts)
    assert (found["code"], fix in found["fix"]) == (code, True), found


def test_a_rounding_must_be_allowed(module: str) -> None:
    from rapid_llm.kernels import Numerics

    spec = scratch.op_spec(numerics=Numerics(roundings=("weight:bf16",)))
    with scratch.registered(spec, scratch.row("native/scratch", f"{module}:native", priority=0)):
        add(module, roundings=("weight:bf16",))
        assert reason("fast/scratch")["code"] == "rounding"
        assert dispatch("scratch", allow=("weight:bf16",), **FACTS).spec.name == "fast/scratch"
        with pytest.raises(ArgumentError, match="unknown rounding 'weight:fp8'"):
            dispatch("scratch", allow=("weight:fp8",), **FACTS)


def test_forcing_precedence(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """argument > context > the op's variable > the global variable."""
    add(op)
    monkeypatch.setenv("RAPID_LLM_FORCE_BACKEND", "native")
    assert dispatch("scratch", **FACTS).spec.name == "native/scratch"
    monkeypatch.setenv("RAPID_LLM_SCRATCH_BACKEND", "fast")
    assert dispatch("scratch", **FACTS).spec.name == "fast/scratch"
    with use_backend("native"):
        assert dispatch("scratch", **FACTS).spec.name == "native/scratch"
        assert dispatch("scratch", backend="fast/scratch", **FACTS).spec.name == "fast/scratch"
    assert explain("scratch", **FACTS).json()["forced"] == {"what": "fast", "by": "RAPID_LLM_SCRATCH_BACKEND"}


def test_forcing_what_is_not_there_raises_at_once(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownRowError, match="did you mean 'native'"):
        dispatch("scratch", backend="natve", **FACTS)
    with pytest.raises(UnknownRowError, match="backend or row 'cuda_magic'"), use_backend("cuda_magic"):
        pass
    monkeypatch.setenv("RAPID_LLM_SCRATCH_BACKEND", "fst")
    with pytest.raises(UnknownRowError, match="'fst'"):
        dispatch("scratch", **FACTS)


def test_forcing_a_row_that_cannot_run_gives_its_reasons(op: str) -> None:
    add(op, devices=("cuda",))
    with pytest.raises(ForcedRowError, match=r"fast/scratch: runs on cuda, not cpu \(move the tensors to cuda\)"):
        dispatch("scratch", backend="fast", **FACTS)


def test_an_override_that_never_ran_is_reported(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add(op)
    monkeypatch.setenv("RAPID_LLM_FORCE_BACKEND", "fast")
    dispatch("scratch", backend="native", **FACTS)
    overrides.current("scratch")
    monkeypatch.setattr(overrides, "_ran", set())
    assert ("RAPID_LLM_FORCE_BACKEND", "fast") in overrides.never_ran()
    dispatch("scratch", **FACTS)
    assert ("RAPID_LLM_FORCE_BACKEND", "fast") not in overrides.never_ran()


def test_a_missing_row_is_reported_once_and_strict_refuses(
    op: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P54: the floor answering for a broken faster row is one warning with the reason, never silence."""
    add(op, available=f"{op}:why")
    with caplog.at_level(logging.WARNING, "rapid_llm"):
        for tokens in (1, 2, 3):
            assert dispatch("scratch", device="cpu", dtype="fp32", dims={"tokens": tokens}).spec.is_native
    lines = [r.message for r in caplog.records if "fast/scratch" in r.message]
    assert lines == ["scratch runs on its floor; fast/scratch is out: the gadget is unplugged"]
    assert trace.falls()["scratch"] >= 3
    monkeypatch.setenv("RAPID_LLM_STRICT", "1")
    with pytest.raises(StrictFallbackError, match="the gadget is unplugged"):
        dispatch("scratch", **FACTS)


def test_a_missing_row_that_nobody_measured_is_no_fall(
    op: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: strict refusing every call because an adapter's library, behind the floor anyway, is not installed."""
    add(op, available=f"{op}:why", priority=UNMEASURED)
    monkeypatch.setenv("RAPID_LLM_STRICT", "1")
    with caplog.at_level(logging.WARNING, "rapid_llm"):
        assert dispatch("scratch", **FACTS).spec.is_native
    assert not [r.message for r in caplog.records if "fast/scratch" in r.message]
    assert reason("fast/scratch")["text"] == "the gadget is unplugged"


def test_no_proof_is_asked_for_on_a_device_that_the_row_does_not_run_on(op: str) -> None:
    """Catches: "prove it on this machine" of a GPU's row on a CPU, which no command can do."""
    add(op, proven=False, devices=("cuda",))
    assert reason("fast/scratch")["code"] == "device"


def test_the_choice_does_not_depend_on_the_order_of_registration(module: str) -> None:
    names = ["a/scratch", "b/scratch", "c/scratch"]
    chosen = set()
    for order in (names, names[::-1]):
        with scratch.registered(scratch.op_spec(), scratch.row("native/scratch", f"{module}:native", priority=0)):
            for name in order:
                add(module, name)
            chosen.add(dispatch("scratch", **FACTS).spec.name)
    assert chosen == {"a/scratch"}


def test_explain_as_table_and_json(op: str) -> None:
    add(op, shape=Shape(require=(Dim("hidden", min=128),)))
    explanation = explain("scratch", **FACTS)
    assert explanation.selected == "native/scratch"
    text = str(explanation)
    assert "-> native/scratch" in text
    assert "needs hidden >= 128, got 64. Fix: change hidden" in text
    data = json.loads(json.dumps(explanation.json()))
    assert set(data) >= {"op", "key", "selected", "rows"}
    assert set(data["rows"][0]) >= {"name", "admitted", "reasons", "evidence"}


def test_explain_says_why_an_admitted_row_lost(op: str) -> None:
    add(op, "near/scratch", shape=Shape(prefer=(Dim("tokens", max=8),)), priority=1)
    add(op, "far/scratch", shape=Shape(prefer=(Dim("tokens", min=9),)), priority=9)
    text = str(explain("scratch", **FACTS))
    assert "-> near/scratch" in text
    assert "slower here by its own account: prefers tokens >= 9" in text
    with use_backend("native"):
        assert "use_backend forces native" in str(explain("scratch", **FACTS))


def test_a_row_is_not_proven_by_the_name_of_its_target(op: str) -> None:
    """Catches: a plugin row that points into this package and so passes for one of its own."""
    target = "rapid_llm.kernels.ops.elementwise.scale:scale"
    with pytest.raises(RegistrationError, match="signature"):
        register(scratch.row("fast/scratch", target, available=f"{op}:yes"))
    register(KernelSpec("fast/scale", "scale", "fast", f"{op}:yes_scale", available=f"{op}:yes", priority=99))
    try:
        assert not next(v for v in explain("scale", device="cpu").rows if v.row.name == "fast/scale").admitted
    finally:
        registry.unregister("fast/scale")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"device": "tpu"}, "unknown device tpu"),
        ({"device": "cuda:x"}, "unknown device cuda:x"),
        ({"dims": {"tokens": "1"}}, "dims must map names to whole numbers"),
        ({"dims": {"tokens": -1}}, "dims must map names to whole numbers"),
        ({"layout": ("nope",)}, "unknown layout tag 'nope'"),
        ({"layout": "contiguous"}, "layout must be a tuple"),
        ({"allow": "weight:fp16"}, "allow must be a tuple"),
    ],
)
def test_stated_facts_are_checked(op: str, facts: dict[str, Any], expected: str) -> None:
    with pytest.raises(ArgumentError, match=expected):
        dispatch("scratch", **{**FACTS, **facts})


def test_wrong_facts_are_named(op: str) -> None:
    with pytest.raises(ArgumentError, match="unknown dimension 'hiden'"):
        dispatch("scratch", dims={"hiden": 3})
    with pytest.raises(ArgumentError, match="unknown fact 'dtpye'"):
        dispatch("scratch", dtpye="fp32")
    with pytest.raises(ArgumentError, match="unknown dtype 'fp99'"):
        dispatch("scratch", dtype="fp99")
    with pytest.raises(UnknownOpError, match="did you mean 'scratch'"):
        dispatch("scrach")


def test_a_row_whose_module_fails_to_import_is_broken_not_fatal(op: str, monkeypatch: Any, tmp_path: Any) -> None:
    text = """
        import sys
        if "pytest" in sys.modules:  # fails here, though not in the probe's child process
            raise AssertionError("wrong driver")
        def f(input, weight, factor=1.0, out=None): ...
    """
    scratch.make_module(tmp_path, "half_there", text)
    register(scratch.row("fast/scratch", "half_there:f", available=f"{op}:yes", priority=5))
    scratch.prove("fast/scratch")
    assert dispatch("scratch", **FACTS).spec.name == "native/scratch"
    found = reason("fast/scratch")
    assert found["code"] == "broken"
    assert "AssertionError: wrong driver" in found["text"]


def test_rows_are_listed_without_torch(op: str) -> None:
    from rapid_llm.kernels.registry import listing

    add(op, proven=False)
    listed = {r["name"]: r for r in listing("cpu")}
    assert set(listed["fast/scratch"]) == {"op", "name", "backend", "admitted", "reasons", "priority", "evidence"}
    assert listed["fast/scratch"]["reasons"][0]["code"] == "unverified"  # type: ignore[index]
    assert listed["native/scratch"]["admitted"] is True
    assert all(registry.get_op(str(r["op"])) for r in listed.values() if r["op"])
