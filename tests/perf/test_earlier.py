"""Runs against earlier ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from rapid_llm.perf import earlier
from rapid_llm.perf.arms import OURS
from rapid_llm.perf.cases import Case
from rapid_llm.perf.needs import Needs
from rapid_llm.perf.offline import ArmResult, CaseResult

from .support import LIMITS

CASE = Case("decode", 1, 100, 10)


def record(ours: float = 2.0, peer: float | None = None, noise: float = 0.001, limit: float = 1.0) -> dict[str, Any]:
    def samples(middle: float) -> tuple[float, ...]:
        return tuple(middle * (1 + noise * (i % 3 - 1)) for i in range(9))

    result = CaseResult(CASE, Needs(4e12 * limit, 0.0), {OURS: ArmResult(CASE, samples(ours))})
    if peer is not None:
        result.arms["transformers"] = ArmResult(CASE, samples(peer))
    made = {
        "perf_kind": "engine",
        "perf_schema": 1,
        "model": {"name": "tiny", "dtype": "bf16", "quantization": None, "ranks": 1, "device": "cuda"},
        "machine": {"slug": "h200"},
        "cases": [result.json(LIMITS)],
    }
    return json.loads(json.dumps(made))  # type: ignore[no-any-return]


def verdict(now: dict[str, Any], then: dict[str, Any]) -> tuple[str, str]:
    (change,) = earlier.changes(now, then)
    return change.verdict, change.reference


def test_slower_is_seen_faster_is_seen_and_noise_is_not() -> None:
    """Catches: a ratio upside down, a verdict without its interval."""
    assert verdict(record(2.2), record(2.0)) == ("SLOW", "the limits of each run")
    assert verdict(record(1.8), record(2.0))[0] == "FAST"
    assert verdict(record(2.01), record(2.0))[0] == "SAME"
    assert verdict(record(2.2, noise=0.2), record(2.0, noise=0.2))[0] == "UNDECIDED"


def test_a_slower_machine_is_no_slower_engine() -> None:
    """Catches: times of two runs compared as they are, where a peer or the limits of each run are there to compare
    with."""
    assert verdict(record(4.0, peer=8.0), record(2.0, peer=4.0)) == ("SAME", "transformers's")
    assert verdict(record(4.0, peer=4.0), record(2.0, peer=4.0))[0] == "SLOW"
    assert verdict(record(4.0, limit=2.0), record(2.0, limit=1.0))[0] == "SAME"
    assert verdict(record(4.0, peer=8.0), record(2.0)) == ("SLOW", "the limits of each run")


def test_a_case_that_failed_or_is_new_has_no_verdict() -> None:
    """Catches: a KeyError on a case that was refused, or one matched with another case."""
    failed = record()
    failed["cases"][0] = {**CASE.__class__("decode", 1, 100, 10).json(), "failure": {"code": "x", "reason": "y"}}
    assert list(earlier.changes(failed, record())) == []
    assert list(earlier.changes(record(), failed)) == []
    other = copy.deepcopy(record())
    other["cases"][0]["batch"] = 2
    assert list(earlier.changes(record(), other)) == []


def test_other_models_and_machines_are_not_compared() -> None:
    """Catches: bf16 held against fp32, one GPU against another."""
    then = record()
    then["model"]["dtype"] = "fp32"
    then["machine"]["slug"] = "h100"
    with pytest.raises(ValueError, match=r"old\.json.*dtype 'fp32' and 'bf16', machine 'h100' and 'h200'"):
        earlier.check_comparable(record(), then, Path("old.json"))


@pytest.mark.parametrize("text", ["", "[]", '{"perf_kind": "serving", "perf_schema": 1}', '{"kernel_schema": 1}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    """Catches: a kernel benchmark's file, or a broken one, that gives no change and passes."""
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="--compare"):
        earlier.load(path)
    with pytest.raises(ValueError, match="--compare"):
        earlier.load(tmp_path / "missing.json")
