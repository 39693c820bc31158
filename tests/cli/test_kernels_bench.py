"""`rapid-llm kernels bench`: what is measured, what is said of it, and what is refused before anything is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rapid_llm.cli import generate
from rapid_llm.kernels import dispatch
from rapid_llm.tuning import measure
from rapid_llm.tuning.calls import Call
from rapid_llm.tuning.measure import Result

from .support import call, rapid_llm


def test_times_become_records(tmp_path: Path) -> None:
    """Catches: a command that measures and keeps nothing, or records that the next process doesn't read."""
    env = {"RAPID_LLM_CACHE_DIR": str(tmp_path)}
    few = ("--rounds", "14", "--seconds", "0.1")
    done = rapid_llm(
        "kernels", "bench", "sample", "--dim", "rows=2", "--dim", "vocab=64", *few, "--write", "user", "--json", env=env
    )
    if done.returncode == 1:  # a machine too busy to measure on says so
        pytest.skip(json.loads(done.stdout)["results"][0]["failure"])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["measured"] == 1
    assert Path(report["written"]).parent == tmp_path / "records" / "timings"
    facts = ("--device", "cpu", "--dtype", "fp32", "--dim", "rows=2", "--dim", "vocab=64")
    shown = rapid_llm("kernels", "explain", "sample", *facts, env=env)
    assert "measured: " in shown.stdout


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls that the command would measure; each of them fails."""
    calls: list[Call] = []

    def measured(call: Call, device: str, **options: Any) -> Result:
        calls.append(call)
        return Result(call, "native/x", failure="not today")

    monkeypatch.setattr(measure, "measure", measured)
    return calls


def test_nothing_measured_is_status_1(asked: list[Call], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: success reported by a run in which every call was refused."""
    done = call(
        "kernels", "bench", "rmsnorm", "--dim", "tokens=2", "--dim", "hidden=8", "--device", "cpu", capsys=capsys
    )
    assert done.status == 1
    assert "not today" in done.out
    assert "0 of 1 calls measured" in done.out


def test_sizes_of_a_model(asked: list[Call], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a model's name taken for a file; options that do not reach the calls."""
    given = ("--model", "smollm2-135m", "--dtype", "bf16", "--scheme", "q4_1", "--quick", "--device", "cpu", "--json")
    done = call("kernels", "bench", "linear", "silu_and_mul", *given, capsys=capsys)
    assert done.status == 1
    assert {c.dims["features"] for c in asked if c.op == "silu_and_mul"} == {1536}
    assert {(c.dtype, c.scheme) for c in asked if c.op == "linear"} == {("bf16", "q4_1")}
    assert len(json.loads(done.out)["results"]) == len(asked)


def test_what_a_model_binds(
    asked: list[Call], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: calls at one end of a bound range only; the ops of a model that were not named."""
    facts = {"device": "cpu", "dtype": "fp32"}
    handles = [dispatch("rmsnorm", dims={"tokens": n, "hidden": 64}, **facts) for n in (1, 9)]
    handles.append(dispatch("silu_and_mul", dims={"tokens": 1, "features": 64}, **facts))
    llm = SimpleNamespace(bindings=lambda: [("1 token", handle.spec.op, handle) for handle in handles])
    monkeypatch.setattr(generate, "make_llm", lambda model, options: llm)
    call("kernels", "bench", "rmsnorm", "--model", "some.gguf", "--device", "cpu", capsys=capsys)
    assert [(c.op, c.dims["tokens"]) for c in asked] == [("rmsnorm", n) for n in (1, 9, 8, 512)]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["rmsnorn"], "did you mean 'jit/rmsnorm'|unknown row"),
        (["rmsnorm", "--dim", "tokens"], "use NAME=VALUE"),
        (["rmsnorm", "--dim", "tokens=1", "--model", "llama3-8b"], "one of --trace, --model and --dim"),
        (["rmsnorm", "--trace", "/nowhere"], "not a trace"),
        (["rmsnorm", "--watch"], "--watch needs one row"),
    ],
)
def test_mistakes_cost_no_wait(
    given: list[str], text: str, asked: list[Call], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a run that begins although it was asked for something that does not exist."""
    done = call("kernels", "bench", *given, "--device", "cpu", capsys=capsys)
    assert done.status == 2
    assert any(part in done.err for part in text.split("|")), done.err
    assert not asked
