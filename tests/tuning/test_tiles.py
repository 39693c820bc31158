"""The search for tiles: what is tried, what a candidate can break, what is believed, and what is kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rapid_llm.kernels
import rapid_llm.kernels.ops.layernorm.rmsnorm  # noqa: F401 - registers its heuristic
from rapid_llm.kernels.ops import tile_policy
from rapid_llm.kernels.ops.tile_policy import resolve_tiles
from rapid_llm.kernels.registry import get_row, records, tile_records, timing_records
from rapid_llm.kernels.registry.records import USER
from rapid_llm.kernels.registry.timings import Timing
from rapid_llm.tuning import tiles, tune
from rapid_llm.tuning.calls import Call
from rapid_llm.tuning.tiles import Task, Trial, neighbours, search
from rapid_llm.verify import pool

from .crashing import QUESTION, children

ROW = "native/rmsnorm"
CALL = Call("rmsnorm", "fp32", None, {"tokens": 3, "hidden": 64})
KIND = "cuda test"
DIMS = {"hidden": 64, "itemsize": 4}
BEST = {"BLOCK": 64, "BLOCKS": 1, "num_warps": 8}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Records in a folder of the test's own; every device of class `cuda test`."""
    monkeypatch.setattr(records, "folder", lambda layer: tmp_path / layer)
    monkeypatch.setattr(timing_records, "device_class", lambda device, index=None: KIND)
    monkeypatch.setattr(tile_policy, "sm_version", lambda device=None: 90)
    tile_records.forget()
    tile_policy.forget()
    yield
    tile_records.forget()
    tile_policy.forget()


def scripted(times: Mapping[int, float], *, wrong: str = "") -> tiles.Do:
    """Children by whose word a candidate's time depends on its warps alone."""

    def do(tasks: Sequence[Task]) -> list[Any]:
        answers: list[Any] = []
        for task in tasks:
            ratio = times.get(task.meta.get("num_warps", 1), 1.0)
            timing = Timing(10 * ratio, 9 * ratio, 11 * ratio, ratio, ratio * 0.995, ratio * 1.005)
            known: dict[str, Any] = {"ask": [QUESTION], "prove": wrong, "time": Trial(task.meta, timing)}
            answers.append(known[task.kind])
        return answers

    return do


def test_a_crash_costs_the_candidate_alone() -> None:
    """Catches P63: a candidate whose illegal instruction ends the search, or the process that started it."""
    found = search(CALL, QUESTION, ROW, "cuda", children, seconds=0.1)
    assert found.best is not None
    assert dict(found.best.meta) == BEST
    out = {tuple(t.meta.values()): t.failure for t in found.tried if t.failure}
    assert "SIGABRT" in out[64, 1, 2]
    assert out[64, 1, 4] == "wrong_result: off by one"
    assert any(t.meta["num_warps"] == 16 and t.timing for t in found.tried), "those after a crash are tried too"


def test_a_candidate_wins_beyond_noise_only() -> None:
    """Catches: tiles that change from one run to the next because of noise."""
    assert search(CALL, QUESTION, ROW, "cuda", scripted({2: 0.995, 8: 0.992}), seconds=1).best is None
    found = search(CALL, QUESTION, ROW, "cuda", scripted({2: 0.8, 8: 0.799}), seconds=1)
    assert found.best is not None
    assert found.best.meta["num_warps"] == 2


def test_a_winner_that_is_not_proven_is_not_kept(tmp_path: Path) -> None:
    """Catches B51: tiles kept because they are fast, by a search in which nobody looked at all of the result."""
    path = tile_records.path_of(USER, KIND)
    (outcome,) = tune.tune([CALL], "cuda", path=path, seconds=1, do=scripted({8: 0.5}, wrong="case 3: element 7"))
    assert outcome.found[0].best is None
    assert "not proven: case 3: element 7" in outcome.found[0].text
    assert not path.exists()


def test_what_is_kept_is_what_the_kernel_gets() -> None:
    """Catches: tuned tiles that `resolve_tiles` never asks for, or takes for other dimensions, or on a CPU."""
    gpu = torch.device("cuda", 0)
    stated = dict(resolve_tiles("rmsnorm", gpu, **DIMS))
    path = tile_records.path_of(USER, KIND)
    (outcome,) = tune.tune([CALL], "cuda", path=path, seconds=1, do=scripted({8: 0.5}))
    assert outcome.json()["tiles"][0]["best"] == BEST
    assert dict(resolve_tiles("rmsnorm", gpu, **DIMS)) == BEST != stated
    assert dict(resolve_tiles("rmsnorm", gpu, hidden=128, itemsize=4))["num_warps"] != 8
    assert dict(resolve_tiles("rmsnorm", torch.device("cpu"), **DIMS)) == stated


def entry(**changes: Any) -> tile_records.Tuned:
    fields = {"tiles": "rmsnorm", "row": ROW, "dims": DIMS, "meta": BEST, "was": {}, "us": 1, "ratio": 0.5}
    return tile_records.Tuned(**{**fields, "low": 0.4, "high": 0.6, **changes})  # type: ignore[arg-type]


def kept(source: Any, **changes: Any) -> dict[str, int]:
    path = tile_records.path_of(USER, KIND)
    path.unlink(missing_ok=True)
    tile_records.write(path, KIND, [entry(**changes)], {ROW: source})
    tile_policy.forget()
    return dict(resolve_tiles("rmsnorm", torch.device("cuda", 0), **DIMS))


def test_tiles_end_with_the_source_they_were_made_for() -> None:
    """Catches: tiles of an older kernel given to a new one, that may not even cover its rows."""
    source = timing_records.source_of(get_row(ROW))
    assert source is not None
    assert kept(source) == BEST
    assert kept(replace(source, raw="old")) == BEST
    assert kept(replace(source, raw="old", digest="old")) != BEST


def test_tiles_of_another_shape_of_launch_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a launch without an option that it needs, or with a block of no elements."""
    source = timing_records.source_of(get_row(ROW))
    assert kept(source, meta={"BLOCK": 64}) != {"BLOCK": 64}
    with caplog.at_level(logging.WARNING):
        assert kept(source, meta={**BEST, "BLOCK": 0})["BLOCK"] == 64
    assert "are ignored" in caplog.text


def test_neighbours_cover_what_the_heuristic_covers() -> None:
    """Catches: a smaller block without the further one that makes up for it; a candidate equal to what it is from."""
    meta = {"BLOCK": 64, "BLOCKS": 2, "num_warps": 4, "num_stages": 2, "STEP": 48}
    found = list(neighbours(meta))
    assert meta not in found
    assert {(m["BLOCK"], m["BLOCKS"]) for m in found} == {(64, 2), (32, 4), (128, 1)}
    assert {m["num_warps"] for m in found} == {1, 2, 4, 8, 16}
    assert {m["STEP"] for m in found} == {48}


def test_choosing_ends_with_its_block() -> None:
    """Catches: a candidate's tiles left in force after a failure in the search."""
    cpu = torch.device("cpu")
    before = dict(resolve_tiles("rmsnorm", cpu, **DIMS))
    seen = []

    def fail() -> None:
        with tile_policy.choosing(lambda name, dims, stated: BEST):
            seen.append(dict(resolve_tiles("rmsnorm", cpu, **DIMS)))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert seen == [BEST]
    assert dict(resolve_tiles("rmsnorm", cpu, **DIMS)) == before


def test_a_row_that_asks_for_nothing_says_so() -> None:
    """Catches: a search on a machine where PyTorch answers, which times PyTorch."""

    def do(tasks: Sequence[Task]) -> list[Any]:
        return [[] for _ in tasks]

    (outcome,) = tune.tune([CALL], "cpu", path=None, seconds=1, do=do)
    assert "asks for no tiles here" in outcome.failure
    lost = [pool.Lost(Task("ask", CALL, ROW, "cpu"), "killed", 1.0)]
    (outcome,) = tune.tune([CALL], "cpu", path=None, seconds=1, do=lambda tasks: lost)
    assert outcome.failure == "the row does not answer as it is: killed"


@pytest.mark.gpu
@pytest.mark.timeout(400)  # each candidate is compiled and proven in a process of its own
def test_tiles_on_a_gpu(tmp_path: Path) -> None:
    """Catches: a search that finds nothing to time on a real GPU, or keeps what a proof refused."""
    call = Call("rmsnorm", "bf16", None, {"tokens": 512, "hidden": 4096})
    (outcome,) = tune.tune([call], "cuda", path=tmp_path / "tiles.json", seconds=0.3)
    assert not outcome.failure
    (found,) = outcome.found
    assert any(trial.timing for trial in found.tried)
    assert found.best is None or "proven" in found.text
