"""Which rows deterministic mode takes, and what it says where none will do."""

from __future__ import annotations

import pytest

from rapid_llm.engine import invariance
from rapid_llm.engine.random_llm import random_llm
from rapid_llm.kernels import dispatch, explain
from rapid_llm.kernels.registry import NoKernelError
from tests.engine.test_random_llm import TINY


def test_dispatch_takes_only_rows_that_declare_it_and_says_why() -> None:
    """Catches: a filter that lets others through, a reason nobody can act on, one cached choice for both kinds."""
    facts = {"device": "cpu", "dtype": "fp32"}
    assert dispatch("scale", **facts, batch_invariant=True).spec.batch_invariant
    with pytest.raises(NoKernelError, match=r"gelu_and_mul: no row can run this call(.|\n)*other bits in a batch"):
        dispatch("gelu_and_mul", **facts, batch_invariant=True)
    assert dispatch("gelu_and_mul", **facts).spec.name == "native/gelu_and_mul"
    told = explain("gelu_and_mul", **facts, batch_invariant=True)
    (verdict,) = [v for v in told.rows if v.row.name == "native/gelu_and_mul"]
    assert [r.code for r in verdict.reasons] == ["batch"]


def test_an_op_without_such_a_row_falls_back() -> None:
    """Catches: a deterministic engine that cannot start, or that keeps a variant row where there is a better one."""
    facts = {"device": "cpu", "dtype": "fp32"}
    assert invariance.choose(op="gelu_and_mul", **facts).spec.name == "native/gelu_and_mul"
    assert invariance.choose(op="embedding", scheme="unquantized", **facts).spec.batch_invariant


def test_a_deterministic_engine_tells_what_its_determinism_rests_on() -> None:
    """Catches: an option that changes no choice, and a report that claims invariance for rows without it."""
    llm = random_llm(TINY, device="cpu", dtype="float32", threads=1, max_model_len=64, deterministic=True)
    settings = llm.explain().json()["settings"]
    assert settings["batch invariance"].startswith(
        "one request at a time, for these have no batch-invariant row here: "
    )
    named = settings["batch invariance"].rpartition(": ")[2].split(", ")
    assert "attention.prefill" in named
    assert "embedding" not in named
    for _, op, handle in llm.bindings():
        if op == "embedding":
            assert handle.decision.facts.batch_invariant
