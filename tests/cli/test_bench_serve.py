"""`rapid-llm bench --serve` in this process, servers replaced."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rapid_llm.perf.http import HttpError
from rapid_llm.perf.traffic import Answer, Traffic, figures
from tests.perf.conftest import calm as calm  # a fixture of that room
from tests.perf.support import LIMITS

from .support import call

pytestmark = pytest.mark.usefixtures("calm")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """asked: (address, model, runs) of each load; started: commands of servers; gives: answers, or an exception."""
    state = SimpleNamespace(asked=[], started=[], gives=None)

    async def load(client: Any, model: str | None, runs: list[Traffic], *, told: Any, patience: float) -> Any:
        state.asked.append((client, model, runs, patience))
        if isinstance(state.gives, Exception):
            raise state.gives
        found = [figures(run, state.gives or [Answer(0.0, times=[0.1, 0.15], tokens=2)] * 4, 0.0) for run in runs]
        told(found[0])
        return {"model": "shown", "ignore_eos": True, "runs": found}

    @contextlib.contextmanager
    def running(words: list[str]) -> Iterator[str]:
        state.started.append(words)
        yield "http://127.0.0.1:1"

    monkeypatch.setattr("rapid_llm.perf.serving.load", load)
    monkeypatch.setattr("rapid_llm.perf.limits.measure_limits", lambda *args: replace(LIMITS, kind="cpu"))
    monkeypatch.setattr("rapid_llm.perf.local_server.running", running)
    return state


def test_options_reach_the_load(served: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Catches: an option that is accepted and dropped, milliseconds for seconds, a key in the result file."""
    out = tmp_path / "r.json"
    args = ["--serve", "http://host:8000/v1", "--rate", "1,inf", "--requests", "4", "--prompt-tokens", "5"]
    args += ["--output-tokens", "2", "--ttft-slo", "0.2", "--itl-slo", "0.04", "--api-key", "secret", "--seed", "9"]
    args += ["--model", "theirs", "--out", str(out), "--json"]
    done = call("bench", *args, capsys=capsys)
    assert done.status == 0, done.err
    ((client, model, runs, patience),) = served.asked
    assert (client.host, client.headers, model, patience) == ("host", {"Authorization": "Bearer secret"}, "theirs", 0.0)
    assert runs == [Traffic(rate, 4, 5, 2, 0.2, 0.04, 9) for rate in (1.0, float("inf"))]
    record = json.loads(out.read_text())
    assert record == json.loads(done.out)
    assert "secret" not in out.read_text()
    assert record["perf_kind"] == "serving"
    assert record["disturbed"] is None
    assert [run["rate"] for run in record["runs"]] == [1.0, "inf"]
    assert record["machine"]["versions"]


def test_a_server_is_started_here(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: options of the engine that do not reach the server, a server that is asked before it listens."""
    args = ["--serve", "local", "--shape", "llama-3.2-1b", "--dtype", "bfloat16", "--kv-cache-tokens", "4096"]
    done = call("bench", *args, capsys=capsys)
    assert done.status == 0, done.err
    (words,) = served.started
    assert words[-6:] == ["--shape", "llama-3.2-1b", "--dtype", "bfloat16", "--kv-cache-tokens", "4096"]
    ((client, model, runs, patience),) = served.asked
    assert (client.port, model) == (1, None)
    assert patience > 0
    assert [(run.rate, run.requests, run.prompt_tokens, run.output_tokens) for run in runs] == [(1.0, 100, 512, 128)]
    assert "of roofline" in done.out
    assert "%" in done.out.splitlines()[-1]


def test_the_table(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: seconds under a heading of milliseconds, goodput where no limit was given."""
    args = ["--serve", "http://host", "--requests", "4"]
    plain = call("bench", *args, capsys=capsys).out.splitlines()[-1]
    assert plain.split()[:11] == ["1.0", "26.67", "53.3", "4.0", *["100.0"] * 3, *["50.0"] * 3]
    timed = call("bench", *args, "--ttft-slo", "0.05", capsys=capsys).out.splitlines()[-1]
    assert timed.split()[10:12] == ["0.00", "(0%)"]


def test_failures_are_told_and_fail(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: exit status 0 where requests failed or no server is there."""
    served.gives = [Answer(0.0, times=[0.1], tokens=1), Answer(0.0, error="429: full")]
    done = call("bench", "--serve", "http://host", "--requests", "2", capsys=capsys)
    assert done.status == 1
    assert "1 of 2 requests failed: 429: full" in done.out
    for error in (ConnectionRefusedError("refused"), HttpError(0, "lists no model")):
        served.gives = error
        done = call("bench", "--serve", "http://host", capsys=capsys)
        assert done.status == 1
        assert "http://host" in done.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--serve", "lokal"], "'lokal' is no address"),
        (["--serve", "http://h", "--rate", "0"], "--rate 0"),
        (["--serve", "http://h", "--rate", "x"], "--rate 'x'"),
        (["--serve", "http://h", "--rate", "nan"], "--rate 'nan'"),
        (["--serve", "http://h", "--itl-slo", "-1"], "--itl-slo -1"),
        (["--serve", "http://h", "--shape", "qwen3-8b"], "--shape: the server at http://h"),
        (["--serve", "http://h", "--dtype", "auto"], "--dtype: the server at http://h"),
        (["--serve", "local", "--shape", "qwen3-9b"], "unknown shape 'qwen3-9b'"),
        (["--serve", "local", "--batch", "4"], "--batch goes with a benchmark of an engine"),
        (["--serve", "local", "--profile"], "--profile goes with"),
        (["--rate", "4"], "--rate is about a server"),
    ],
)
def test_mistakes_are_usage_errors(served: Any, capsys: pytest.CaptureFixture[str], args: list[str], says: str) -> None:
    """Catches: an option that is passed over, or a mistake that costs the start of a server."""
    done = call("bench", *args, capsys=capsys)
    assert done.status == 2
    assert says in done.err
    assert not served.asked
    assert not served.started
