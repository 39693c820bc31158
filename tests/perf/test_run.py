"""A whole offline run on a tiny model: what its record holds, and who is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from rapid_llm.bench.errors import MachineBusyError
from rapid_llm.perf import earlier
from rapid_llm.perf.arms import OURS
from rapid_llm.perf.cases import make_cases
from rapid_llm.perf.run import Request, run_offline
from tests.bench.fake_device import FakeDevice

from .support import LIMITS, TINY

CASES = make_cases(prefills=(20,), batches=(2, 500), contexts=(20,), tokens=3)
OPTIONS = {"device": "cpu", "dtype": "float32", "threads": 1, "kv_cache_tokens": 512, "max_running": 2}
REQUEST = Request(TINY, None, OPTIONS, CASES, rounds=3, command="rapid-llm bench")


def limits(*args: Any, again: bool = False) -> Any:
    """Memory is measured a second time, and is faster then."""
    return replace(LIMITS, kind="cpu", bytes_per_second=8e12) if again else LIMITS


@pytest.mark.usefixtures("calm")
def test_the_record_holds_what_a_reader_needs() -> None:
    """Catches: a record without its rows, versions, limits or samples; a case that did not fit and is not there;
    shares of a ceiling that was measured lower a second time; values that JSON does not have."""
    told: list[str] = []
    device: Any = FakeDevice(kind="cpu")
    outcome = run_offline(
        replace(REQUEST, profile=True, peers=["transformers"]),
        told=lambda result, ceiling: told.append(result.case.title),
        device=device,
        limits=limits,
    )
    record = json.loads(json.dumps(outcome.record, allow_nan=False))
    assert told == ["prefill of 20 tokens", "decode, batch 2, context 20"]
    assert outcome.measured == 2
    assert (record["perf_kind"], record["perf_schema"]) == (earlier.KIND, earlier.SCHEMA)
    by_title = {f"{c['kind']} {c['batch']}": c for c in record["cases"]}
    assert by_title["decode 500"]["failure"]["code"] == "left_out"
    decode = by_title["decode 2"]
    assert len(decode["arms"][OURS]["samples"]) == 3
    assert "named --shape" in decode["missing"]["transformers"]
    assert record["limits"]["bytes_per_second"]["measured"] == 8e12
    assert record["limits"]["measured_twice"] is True
    share = decode["needs"]["bytes"] / decode["arms"][OURS]["seconds"]["median"] / 8e12
    assert decode["arms"][OURS]["share_of_bandwidth"] == pytest.approx(share)
    assert decode["arms"][OURS]["seconds"]["median"] > 0
    weights = 4 * (64 * 128 + 64 * 64 + 3 * 64 * 96) * 2 + 4 * (5 * 64 + 320 * 64)
    assert record["model"]["read_bytes"] == {"weights": weights, "experts": 0}
    assert decode["needs"]["bytes"] == 3 * (weights + 2 * 256) + 2 * (21 + 22 + 23) * 512
    assert record["model"]["name"] == "tiny"
    assert {row["op"] for row in record["engine"]["rows"]} >= {"linear", "attention.decode", "sample"}
    assert record["machine"]["versions"]["torch"]
    assert "revision" in record["machine"]
    assert {line["phase"] for line in record["profile"]["ops"]} == {"prefill", "decode"}
    assert record["disturbed"] is False
    assert [figure["name"] for figure in record["figures"]] == told


@pytest.mark.usefixtures("calm")
def test_a_cache_that_leaves_no_memory_costs_no_result() -> None:
    """Catches: an hour of figures lost because the limits could not be measured a second time."""

    def full(*args: Any, again: bool = False) -> Any:
        if again:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return replace(LIMITS, kind="cpu")

    device: Any = FakeDevice(kind="cpu")
    small = replace(REQUEST, cases=make_cases(prefills=(8,), batches=(1,), contexts=(8,), tokens=0))
    outcome = run_offline(small, device=device, limits=full)
    assert outcome.measured == 1
    assert outcome.record["limits"]["measured_twice"] is False


def test_a_busy_machine_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: minutes of loading before the refusal, or figures in spite of it."""

    def busy(**given: Any) -> Any:
        raise MachineBusyError("other programs use 2.00 CPUs")

    monkeypatch.setattr("rapid_llm.bench.results.require_idle", busy)
    monkeypatch.setattr("rapid_llm.perf.run.build", lambda *args: pytest.fail("built"))
    device: Any = FakeDevice(kind="cpu")
    with pytest.raises(MachineBusyError):
        run_offline(REQUEST, device=device, limits=limits)
    with pytest.raises(ValueError, match="'vllm' is not known"):
        run_offline(replace(REQUEST, peers=["vllm"]), device=device, limits=limits)
