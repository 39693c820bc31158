"""`rapid-llm kernels tune`: what it says where there is nothing to tune, and what it shows where there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rapid_llm.tuning import tune as tuning
from tests.tuning.crashing import QUESTION, children

from .support import call

DIMS = ("--dim", "tokens=3", "--dim", "hidden=64", "--device", "cpu")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that ask one question and then do as `crashing` says."""
    tune = tuning.tune

    def do(tasks: Any) -> list[Any]:
        return [[QUESTION]] if tasks[0].kind == "ask" else children(tasks)

    monkeypatch.setattr(tuning, "tune", lambda calls, device, **options: tune(calls, device, **options, do=do))


@pytest.mark.usefixtures("scripted")
def test_the_search_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a crashed candidate that nobody hears of; tiles written where nothing was asked to be."""
    done = call("kernels", "tune", "rmsnorm", *DIMS, capsys=capsys)
    assert done.status == 0
    assert "num_warps=8 instead of BLOCK=64 BLOCKS=1 num_warps=1: 0.500 of the time" in done.out
    assert "SIGABRT" in done.out
    assert "1 tiles better than the heuristics" in done.out
    assert not list(tmp_path.iterdir())
    done = call("kernels", "tune", "rmsnorm", *DIMS, "--write", str(tmp_path), "--json", capsys=capsys)
    report = json.loads(done.out)
    assert report["kept"] == 1
    assert json.loads(Path(report["written"]).read_text())["tiles"][0]["meta"]["num_warps"] == 8


def test_a_cpu_has_no_tiles(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: PyTorch timed against itself, and tiles kept for it."""
    tune = tuning.tune
    nothing: Any = lambda tasks: [[] for _ in tasks]  # noqa: E731
    monkeypatch.setattr(tuning, "tune", lambda calls, device, **options: tune(calls, device, **options, do=nothing))
    done = call("kernels", "tune", "rmsnorm", *DIMS, capsys=capsys)
    assert done.status == 1
    assert "it asks for no tiles here" in done.out


def test_a_row_is_no_op(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: another row's op tuned, silently, for a row that has tiles of its own."""
    done = call("kernels", "tune", "cpp/rmsnorm", *DIMS, capsys=capsys)
    assert done.status == 2
    assert "give the op" in done.err
