"""A verification run as a whole: what it proves, what it refuses to prove, and what takes it down (nothing)."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rapid_llm.kernels.ops  # noqa: F401  (registers the ops)
from rapid_llm.kernels import KernelSpec, register
from rapid_llm.kernels.registry import Dim, Shape, evidence, records, registry, unregister
from rapid_llm.verify import pool
from rapid_llm.verify.verification import Verification, as_json, execute, plan, save

ROW = "mine/scale"
CPU = records.device_class("cpu")
assert CPU is not None
FILE = records.file_name(CPU)


def right(input: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    if out is None:
        return (input.float() * factor).to(input.dtype).contiguous()
    if out is not input and out.untyped_storage().data_ptr() == input.untyped_storage().data_ptr():
        raise RuntimeError("scale: out overlaps input")
    return out.copy_(input.float() * factor)


def last_tile(input: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    """Right on sizes that are a multiple of 64; the rest of any other stays as it was."""
    result = right(input, factor, out)
    flat = result.view(-1) if result.is_contiguous() else result.reshape(-1)
    flat[flat.numel() // 64 * 64 :] = 0.0
    return result


def there() -> bool:
    return True


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Iterator[Path]:
    """Rows may be added; records go to a folder of the test's own."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path))
    evidence.reload()
    yield tmp_path
    for name in [row.name for row in registry.rows("scale") if row.backend == "mine"]:
        unregister(name)
    evidence.reload()


def add(function: str, **changes: object) -> None:
    fields = {"dtypes": ("fp32",), "devices": ("cpu",), **changes}
    module = "tests.verify.test_verification"
    register(
        KernelSpec(
            name=ROW, op="scale", backend="mine", target=f"{module}:{function}", available=f"{module}:there", **fields
        )  # type: ignore[arg-type]
    )


def verify(*names: str, budget: str = "full", stale: bool = False) -> Verification:
    run = plan(names or (ROW,), device="cpu", budget=budget, stale_only=stale)
    execute(run, jobs=0)
    return run


def known() -> evidence.Evidence:
    facts = registry_facts()
    return evidence.of(registry.get_row(ROW), facts)


def registry_facts() -> object:
    from rapid_llm.kernels.registry import dispatcher

    return dispatcher.facts_of("scale", (), {"device": "cpu", "dtype": "fp32"})


def test_a_right_row_is_proven_and_stays_so(made: Path) -> None:
    """Catches: a proof that isn't written, or that the next process doesn't find."""
    add("right")
    run = verify()
    assert run.ok, as_json(run)
    path, proofs, left = save(run, "user")
    assert (path, proofs, left) == (made / "records" / FILE, 1, {})
    assert known().state == "record"
    assert known().cases > 20
    assert not plan([ROW], device="cpu", stale_only=True).tasks


def test_a_row_that_is_wrong_in_its_last_tile_is_refused(made: Path) -> None:
    """Catches: a fault that random square inputs don't show; a proof that survives the failure of its row."""
    add("right")
    path, _, _ = save(verify(), "user")
    unregister(ROW)
    add("last_tile")
    run = verify()
    assert not run.ok
    assert run.lacks(run.outcomes[0])
    assert save(run, "user")[1] == 0
    assert ROW not in json.loads(path.read_text())["rows"]
    assert not known().verified


def test_what_an_interrupted_run_proved_is_kept(made: Path) -> None:
    """Catches: a long run that is stopped near its end and leaves nothing, or takes away what it did not come to."""
    add("right", dtypes=("fp32", "fp16"))
    path, proofs, _ = save(verify(), "user")
    assert proofs == 2
    before = json.loads(path.read_text())["rows"][ROW]
    run = plan([ROW], device="cpu")

    def stop(outcome: object, done: int) -> None:
        if done == 2:  # the wrong rows, and one of the two dtypes
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(run, jobs=0, told=stop)
    assert len(run.outcomes) == 1
    assert save(run, "user")[1:] == (1, {})
    assert set(json.loads(path.read_text())["rows"][ROW]["proofs"]) == set(before["proofs"])
    run.scores.clear()  # as if the wrong rows had not been reached
    assert save(run, "user")[1:] == (0, {ROW: "the run was interrupted before wrong rows were tried on its cases"})
    assert json.loads(path.read_text())["rows"][ROW]["proofs"].keys() == before["proofs"].keys()


@pytest.mark.parametrize(
    "shape", [Shape(require=(Dim("numel", min=1 << 40),)), Shape(require=(Dim("numel", multiple_of=64, max=64),))]
)
def test_few_cases_prove_nothing(made: Path, shape: Shape) -> None:
    """Catches B59: no case at all, or so few that a wrong row passes them, taken for a proof."""
    add("right", shape=shape)
    run = verify()
    assert not run.ok
    assert save(run, "user")[1] == 0
    assert not known().verified


def test_a_quick_run_writes_nothing(made: Path) -> None:
    """Catches: a small set of cases that is kept as evidence."""
    add("right")
    run = verify(budget="interpret")
    assert run.ok
    assert save(run, "user")[1] == 0
    assert not known().verified


def test_names_that_are_none(made: Path) -> None:
    """Catches: a misspelt row that is silently not verified."""
    with pytest.raises(ValueError, match="did you mean"):
        plan(["native/scael"], device="cpu")


def test_a_row_that_cannot_run_is_told(made: Path) -> None:
    """Catches: a row that is left out without a word."""
    run = plan(["jit/scale"], device="cpu")
    assert not run.tasks
    assert [s.row for s in run.skips] == ["jit/scale"]
    assert not run.ok


def do(task: str) -> pool.Done:
    """Work for the pool: what the task's name says."""
    if task == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if task == "exit":
        os._exit(3)
    if task == "hang":
        time.sleep(600)
    return pool.Done(task, last=task == "poisoned")


def begin(lock: object) -> None:
    torch.set_num_threads(1)


def test_no_task_takes_the_others_down() -> None:
    """Catches P63: a segmentation fault, an exit or a hang that ends the run, or loses another task."""
    tasks = ["a", "crash", "b", "exit", "hang", "poisoned", "c", "d"]
    results = list(pool.run(tasks, do, begin, jobs=2, limit_s=3.0))
    lost = {r.task: r.why for r in results if isinstance(r, pool.Lost)}
    assert sorted(r for r in results if isinstance(r, str)) == ["a", "b", "c", "d", "poisoned"]
    assert "SIGSEGV" in lost["crash"]
    assert "status 3" in lost["exit"]
    assert "longer than 3 s" in lost["hang"]
