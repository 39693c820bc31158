"""`rapid-llm kernels lock`: from a trace to a file to another process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .support import call, rapid_llm

KEY = {"device": "cpu", "dtype": "fp32", "scheme": None, "layout": ["contiguous"], "allow": [], "prepack": False}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of one call."""
    key = {**KEY, "op": "sample", "sm": None, "dims": {"rows": 2, "vocab": 64}, "capturing": False}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"decisions": [{"key": key, "count": 1}]}))
    return path


def test_export_replay_and_diff(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a file that the next process cannot use; a mismatch that exits with 0."""
    file = tmp_path / "a.lock"
    done = call("kernels", "lock", "export", str(file), "--trace", str(trace), capsys=capsys)
    assert (done.status, done.out) == (0, f"1 decisions written to {file}\n")
    assert call("kernels", "lock", "replay", str(file), capsys=capsys).status == 0
    assert call("kernels", "lock", "diff", str(file), capsys=capsys).status == 0
    edited = tmp_path / "b.lock"
    digest = json.loads(file.read_text())["decisions"][0]["digest"]
    edited.write_text(file.read_text().replace(digest, "other"))
    done = call("kernels", "lock", "replay", str(edited), capsys=capsys)
    assert done.status == 1
    assert "pins native/sample, whose source has changed" in done.out
    done = call("kernels", "lock", "diff", str(file), str(edited), "--json", capsys=capsys)
    assert done.status == 1
    assert "of other source" in json.loads(done.out)[0]["text"]


def test_every_command_obeys_the_variable(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a lock that only its own commands look at; a missing file that is passed over."""
    file = tmp_path / "a.lock"
    call("kernels", "lock", "export", str(file), "--trace", str(trace), capsys=capsys)
    facts = ("sample", "--device", "cpu", "--dtype", "fp32", "--dim", "rows=2", "--dim", "vocab=64")
    done = rapid_llm("kernels", "explain", *facts, env={"RAPID_LLM_LOCK": str(tmp_path / "none")})
    assert done.returncode == 1
    assert "is not a lockfile of decisions" in done.stderr


def test_whose_decisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: an empty file written for nobody's decisions."""
    done = call("kernels", "lock", "export", str(tmp_path / "a.lock"), capsys=capsys)
    assert done.status == 2
    assert "give --trace or --model" in done.err
    done = call("kernels", "lock", "export", str(tmp_path / "a.lock"), "--trace", "/nowhere", capsys=capsys)
    assert done.status == 2
    assert not list(tmp_path.iterdir())
