"""`rapid-llm kernels verify` as a user meets it: statuses, tables, JSON, files."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from rapid_llm.verify.proving import Outcome

from .support import rapid_llm


def test_a_row_is_proven_and_then_needs_no_second_run(tmp_path: Path) -> None:
    """Catches: proofs that the next process doesn't find; a summary that isn't JSON."""
    env = {"RAPID_LLM_CACHE_DIR": str(tmp_path / "cache")}
    done = rapid_llm("kernels", "verify", "kvcache.write", "--device", "cpu", "--jobs", "2", "--json", env=env)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ok"]
    assert {row["dtype"] for row in said["rows"]} == {"fp32", "fp16", "bf16"}
    assert all(m["killed"] == m["tried"] >= 8 for m in said["mutants"])
    assert said["written"]["proofs"] == len(said["rows"])
    assert Path(said["written"]["file"]).parent == tmp_path / "cache" / "records"
    assert "ok" in done.stderr
    again = rapid_llm("kernels", "verify", "kvcache.write", "--device", "cpu", "--stale", env=env)
    assert again.returncode == 0
    assert "is proven" in again.stdout


def test_a_quick_run_shows_a_table_and_keeps_nothing(tmp_path: Path) -> None:
    """Catches: a look that is kept as a proof."""
    done = rapid_llm(
        "kernels", "verify", "native/scale", "--quick", "--device", "cpu", env={"RAPID_LLM_CACHE_DIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    assert "native/scale" in done.stdout
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (("native/scael",), 2, "did you mean"),
        (("jit/scale", "--device", "cpu"), 1, "runs on cuda"),
        (("--device", "cuda:9"), 2, "no such device"),
        (("--replay", "nowhere.pt"), 1, "nowhere.pt"),
    ],
)
def test_what_is_wrong_is_said(args: tuple[str, ...], status: int, says: str) -> None:
    """Catches: exit status 0 after nothing was proven; a traceback for a wrong name."""
    done = rapid_llm("kernels", "verify", *args)
    assert done.returncode == status, done.stdout + done.stderr
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_saved_call_is_made_again(tmp_path: Path) -> None:
    """Catches: a case file that cannot be replayed by the command that its message names."""
    path = tmp_path / "case.pt"
    args = {"input": torch.arange(12.0).view(3, 4).t(), "factor": 0.3}
    saved = {"format": 1, "row": "native/scale", "device": "cpu", "dtype": "fp32", "scheme": None, "case": "mine"}
    torch.save({**saved, "failure": "was wrong", "args": args}, path)
    done = rapid_llm("kernels", "verify", "--replay", str(path))
    assert done.returncode == 0, done.stderr
    assert "was wrong" in done.stdout
    assert "ok (1 cases" in done.stdout


def test_a_run_that_is_terminated_keeps_what_it_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a run under `timeout` that is stopped after an hour and leaves nothing; a handler that stays behind."""
    from rapid_llm.cli import kernels_verify
    from rapid_llm.verify import verification

    def stopped(run: verification.Verification, **_: object) -> None:
        run.outcomes.append(Outcome(run.tasks[-1], "ok", "", 0.0))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(verification, "execute", stopped)
    monkeypatch.setattr(verification, "save", lambda run, to: (tmp_path / to, len(run.outcomes), {}))
    before = signal.getsignal(signal.SIGTERM)
    options = {"dtypes": (), "quick": False, "stale": False, "jobs": 0, "limit": 9.0, "json": False}
    with pytest.raises(KeyboardInterrupt):
        kernels_verify.verify(["native/scale"], device="cpu", write="user", **options)
    assert f"interrupted: 1 proofs written to {tmp_path / 'user'}" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
