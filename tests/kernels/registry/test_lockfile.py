"""Pinned decisions: what a file holds, what it makes dispatch do, and what it refuses to do instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rapid_llm.kernels.registry import codegen, dispatch, dispatcher, evidence, explain, lockfile, records, registry
from rapid_llm.kernels.registry.errors import ForcedRowError, LockError
from tests import scratch

FACTS = {"device": "cpu", "dtype": "fp32", "dims": {"tokens": 4, "hidden": 64}}
OTHER = {**FACTS, "dims": {"tokens": 5, "hidden": 64}}


@pytest.fixture
def rows(op: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`fast/scratch`, proven, and the floor."""
    monkeypatch.setattr(records, "device_class", lambda device, index=None: f"{device} test")
    registry.register(scratch.row("fast/scratch", f"{op}:fast", priority=10))
    scratch.prove("fast/scratch")
    yield op
    lockfile.use(None)
    lockfile._followed[0] = None


def chosen(facts: dict[str, object] = FACTS) -> str:
    return dispatch("scratch", **facts).spec.name  # type: ignore[arg-type]


def exported() -> lockfile.Lock:
    return lockfile.export(d for d in dispatcher.decisions() if d.facts.op == "scratch")


def settle(facts: object) -> object:
    return dispatcher.settle(facts, None)  # type: ignore[arg-type]


def test_a_lock_survives_what_would_change_the_choice(rows: str, tmp_path: Path) -> None:
    """Catches: a file that is written and read back, and decides nothing; a call outside of it that it decides too."""
    assert chosen() == "fast/scratch"
    path = tmp_path / "a.lock"
    lockfile.write(exported(), path)
    registry.register(scratch.row("faster/scratch", f"{rows}:fast", priority=20))
    scratch.prove("faster/scratch")
    assert chosen() == "faster/scratch"
    with lockfile.using(lockfile.load(path)):
        assert chosen() == "fast/scratch"
        assert chosen(OTHER) == "faster/scratch"
        assert f"forced: fast/scratch by {path}" in str(explain("scratch", **FACTS))
        assert dispatch("scratch", **FACTS, backend="native").spec.is_native  # type: ignore[arg-type]
    assert chosen() == "faster/scratch"
    evidence.forget("faster/scratch")


def test_the_variable_names_the_file(rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a variable that the public function's ready keys never hear of."""
    module = __import__(rows)
    function = codegen.public_function("scratch")
    call = (torch.ones(4, 64), torch.ones(64))
    function(*call)
    assert module.CALLS == ["fast"]
    lock = exported()
    entries = {
        k: replace(e, row="native/scratch", digest=lockfile.digest_of("native/scratch"))
        for k, e in lock.entries.items()
    }
    lockfile.write(lockfile.Lock("x", entries), tmp_path / "a.lock")
    monkeypatch.setenv("RAPID_LLM_LOCK", str(tmp_path / "a.lock"))
    dispatcher.notice_environment()
    function(*call)
    assert module.CALLS == ["fast", "native"]
    monkeypatch.delenv("RAPID_LLM_LOCK")
    dispatcher.notice_environment()
    function(*call)
    assert module.CALLS == ["fast", "native", "fast"]


def test_an_edited_row_is_named(rows: str, tmp_path: Path) -> None:
    """Catches: a lock that holds names only, so that the same name runs other code."""
    chosen()
    lock = exported()
    path = tmp_path / f"{rows}.py"
    path.write_text(path.read_text().replace('CALLS.append("fast")', 'CALLS.append("fast"); CALLS.clear()'))
    with lockfile.using(lock), pytest.raises(LockError, match="pins fast/scratch, whose source has changed"):
        chosen()


def test_a_row_that_is_gone_is_named(rows: str) -> None:
    """Catches: the next best row taken in silence."""
    chosen()
    lock = exported()
    registry.unregister("fast/scratch")
    with lockfile.using(lock), pytest.raises(LockError, match="pins fast/scratch, which is not registered here"):
        chosen()


def test_another_machine_is_named(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: decisions of one GPU replayed on another."""
    chosen()
    lock = exported()
    monkeypatch.setattr(records, "device_class", lambda device, index=None: "cpu other")
    wrong = lockfile.replay(lock, settle)  # type: ignore[arg-type]
    assert list(wrong) == ["scratch cpu fp32 hidden=64, tokens=4"]
    assert "decided on cpu test, and this is cpu other" in next(iter(wrong.values()))


def test_a_row_that_cannot_run_is_an_error(rows: str) -> None:
    """Catches: a fall to the floor for a pinned row whose library is missing here."""
    chosen()
    lock = exported()
    registry.unregister("fast/scratch")
    registry.register(scratch.row("fast/scratch", f"{rows}:fast", priority=10, available=f"{rows}:no"))
    with lockfile.using(lock), pytest.raises(ForcedRowError, match="fast/scratch"):
        chosen()
    assert lockfile.replay(lock, settle)  # type: ignore[arg-type]


def test_what_was_forced_is_nobodys_decision(rows: str) -> None:
    """Catches: a debugging session's row pinned for production."""
    dispatch("scratch", **FACTS, backend="native")  # type: ignore[arg-type]
    assert not exported().entries
    chosen()
    with lockfile.using(exported()):
        chosen()
        assert [entry.row for entry in exported().entries.values()] == ["fast/scratch"]


def test_differences(rows: str) -> None:
    """Catches: a change of source shown as none; a call that only one side holds passed over."""
    chosen()
    one = exported()
    assert not lockfile.differences(one, one)
    edited = lockfile.Lock("b", {k: replace(e, digest="other") for k, e in one.entries.items()})
    assert [str(d) for d in lockfile.differences(one, edited)] == [
        "scratch cpu fp32 hidden=64, tokens=4: fast/scratch, of other source"
    ]
    moved = lockfile.Lock("c", {k: replace(e, row="native/scratch") for k, e in one.entries.items()})
    assert str(lockfile.differences(one, moved)[0]).endswith("fast/scratch -> native/scratch")
    assert str(lockfile.differences(lockfile.Lock("d", {}), one)[0]).endswith("not there -> fast/scratch")


@pytest.mark.parametrize("text", ["", "[]", '{"format": 9, "decisions": []}', '{"format": 1, "decisions": [{}]}'])
def test_a_file_that_is_none_is_refused(rows: str, text: str, tmp_path: Path) -> None:
    """Catches: a damaged file taken for one that pins nothing."""
    path = tmp_path / "a.lock"
    path.write_text(text)
    with pytest.raises(LockError, match="is not a lockfile of decisions"):
        lockfile.load(path)
    with pytest.raises(LockError, match="is not a lockfile"):
        lockfile.load(tmp_path / "missing")


def test_a_file_is_the_same_whatever_came_first(rows: str, tmp_path: Path) -> None:
    """Catches: files of equal decisions that version control shows as changed."""
    texts = []
    for order in ((FACTS, OTHER), (OTHER, FACTS)):
        dispatcher.forget(None)
        for facts in order:
            chosen(facts)
        lockfile.write(exported(), tmp_path / "a.lock")
        texts.append((tmp_path / "a.lock").read_text())
    assert texts[0] == texts[1]
    assert len(json.loads(texts[0])["decisions"]) == 2
