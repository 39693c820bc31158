"""`rapid-llm bench` in this process, the run itself replaced."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rapid_llm.perf.arms import OURS
from rapid_llm.perf.cases import Case
from rapid_llm.perf.needs import Needs
from rapid_llm.perf.offline import ArmResult, CaseResult
from rapid_llm.perf.run import Outcome, Request
from tests.perf.support import LIMITS

from .support import call

CASE = Case("decode", 2, 100, 10)


def outcome(seconds: float = 2.0, failure: str = "", **changes: Any) -> Outcome:
    peer = ArmResult(CASE, (8 * seconds,) * 9)
    result = CaseResult(CASE, Needs(4e12, 7e13), {OURS: ArmResult(CASE, (seconds,) * 9), "transformers": peer})
    result.graphs = {"graph_steps": 90, "eager_steps": {"a prompt": 2}, "refused": {"8": "a row is not safe"}}
    if failure:
        result = CaseResult(CASE, Needs(4e12, 7e13), code="too_fast", failure=failure)
    made = Outcome([result], LIMITS)
    made.record = {
        "perf_kind": "engine",
        "perf_schema": 1,
        "machine": {"slug": "here", "cpu": {"model": "a CPU"}, "threads": 2, "gpus": [{"name": "NVIDIA H200"}]},
        "load": {"during": {"others": 1.5}},
        "disturbed": False,
        "force_busy": False,
        "model": {
            "name": "tiny",
            "parameters": 10**9,
            "random_weights": True,
            "dtype": "bf16",
            "device": "cuda",
            "read_bytes": {"weights": 2e9, "experts": 0},
            "kv_bytes_per_token": 131072.0,
            "quantization": None,
            "ranks": 1,
        },
        "limits": LIMITS.json(),
        "cases": [result.json(LIMITS)],
        "profile": None,
        "engine": {"graphs": {"captured": [1, 2]}},
        **changes,
    }
    return made


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Any:
    """asked: the requests; gives: the next outcome."""
    state = SimpleNamespace(asked=[], gives=outcome())

    def run(request: Request, *, told: Any) -> Outcome:
        state.asked.append(request)
        for result in state.gives.results:
            told(result, LIMITS)
        return copy.deepcopy(state.gives)

    monkeypatch.setattr("rapid_llm.perf.run.run_offline", run)
    return state


def test_options_reach_the_run(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: an option that is accepted and dropped."""
    args = ["--shape", "llama-3.2-1b", "--prefill", "128", "--decode", "32", "--batch", "1,16", "--context", "64,512"]
    args += ["--rounds", "5", "--seconds", "9", "--peer", "transformers", "--profile", "--force-busy", "--seed", "7"]
    args += ["--dtype", "bfloat16", "--quantization", "int8", "--device", "cuda", "--max-batch-tokens", "4096"]
    args += [
        "--kv-cache-tokens",
        "1000",
        "--cuda-graphs",
        "off",
        "--threads",
        "2",
        "--kv-cache-dtype",
        "fp8",
        "--tensor-parallel",
        "2",
    ]
    assert call("bench", *args, capsys=capsys).status == 0
    (request,) = ran.asked
    assert (request.shape, request.model, request.seed) == ("llama-3.2-1b", None, 7)
    assert request.options == {
        "dtype": "bfloat16",
        "quantization": "int8",
        "device": "cuda",
        "threads": 2,
        "max_batch_tokens": 4096,
        "kv_cache_tokens": 1000,
        "kv_cache_dtype": "fp8",
        "tensor_parallel": 2,
        "cuda_graphs": "off",
    }
    assert [case.title for case in request.cases] == [
        "prefill of 128 tokens",
        *(f"decode, batch {b}, context {c}" for c in (64, 512) for b in (1, 16)),
    ]
    assert {case.tokens for case in request.cases if case.kind == "decode"} == {32}
    assert (request.rounds, request.max_seconds, request.peers) == (5, 9.0, ["transformers"])
    assert request.profile
    assert request.force_busy


def test_every_rate_stands_beside_its_limits(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a rate without its share, a share of one ceiling under the heading of another."""
    done = call("bench", "--shape", "smollm2-135m", capsys=capsys)
    header, ours, peer = (
        line for line in done.out.splitlines() if line.startswith(("case ", "decode, batch 2, c")) and ":" not in line
    )
    assert header.split("  ")[0] == "case"
    assert [word.strip() for word in ours.split("  ") if word][1:9] == [
        *("rapid-llm", "10.0", "10.0 to 10.0", "200.000", "2.0 TB/s"),
        *("50.0%", "41.7%", "50.0%"),
    ]
    assert "ours 8.00 x (8.00 to 8.00)" in peer
    assert "bound by memory" in ours
    assert "90 steps by CUDA graph, 2 call by call (a prompt)" in done.out
    assert "no graph for a batch of 8: a row is not safe" in done.out
    assert "4.0 TB/s measured (sum); nominal H200 4.8 TB/s" in done.out
    assert "quote none" not in done.out
    ran.gives = outcome(disturbed=True)
    assert "other programs used 1.5 CPUs" in call("bench", "--shape", "smollm2-135m", capsys=capsys).out


def test_json_and_file_and_the_comparison(ran: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Catches: a file that differs from what is printed; a slower case that ends with 0, a faster one with 1."""
    path = tmp_path / "new.json"
    done = call("bench", "--shape", "smollm2-135m", "--json", "--out", str(path), capsys=capsys)
    assert json.loads(done.out) == json.loads(path.read_text())
    assert json.loads(done.out)["cases"][0]["arms"][OURS]["tokens_per_second"]["median"] == 10.0
    for seconds, status, word in ((3.0, 1, "SLOW"), (2.0, 0, "SAME"), (1.5, 0, "FAST")):
        ran.gives = outcome(seconds)
        del ran.gives.record["cases"][0]["arms"]["transformers"]
        done = call("bench", "--shape", "smollm2-135m", "--compare", str(path), capsys=capsys)
        assert done.status == status, done.err
        assert f"beside the limits of each run: {word}" in done.out
    ran.gives = outcome()
    ran.gives.record["machine"]["slug"] = "elsewhere"
    done = call("bench", "--shape", "smollm2-135m", "--compare", str(path), capsys=capsys)
    assert done.status == 2
    assert "machine 'here' and 'elsewhere'" in done.err


def test_nothing_measured_is_no_success(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: exit status 0 where every case was refused."""
    ran.gives = outcome(failure="faster than memory")
    done = call("bench", "--shape", "smollm2-135m", capsys=capsys)
    assert done.status == 1
    assert "too_fast: faster than memory" in done.out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--shape", "llama-3.1-8"], "did you mean 'llama-3.1-8b'"),
        (["--shape", "qwen3-8b", "--model", "x"], "one of --shape and --model"),
        (["--batch", "1;2"], "--batch '1;2'"),
        (["--context", "0"], "--context '0'"),
        (["--decode", "-1"], "--decode -1"),
        (["--rounds", "0"], "--rounds 0"),
        (["--prefill", "0", "--decode", "0"], "nothing to measure"),
        (["--compare", "/nowhere/old.json"], "--compare /nowhere/old.json"),
    ],
)
def test_mistakes_are_usage_errors(ran: Any, capsys: pytest.CaptureFixture[str], args: list[str], says: str) -> None:
    """Catches: a mistake that costs a run before it is told, or a traceback."""
    done = call("bench", *args, capsys=capsys)
    assert done.status == 2
    assert says in done.err
    assert not ran.asked
