"""A row's hook that does not end holds dispatch: whoever waits is told for which row."""

from __future__ import annotations

import dataclasses
import sys
import threading
from types import ModuleType

import pytest

import rapid_llm.kernels.ops  # noqa: F401  (declares the rows)
from rapid_llm.kernels import registry
from rapid_llm.kernels.build import progress
from rapid_llm.kernels.registry import KernelSpec, dispatcher, patience
from rapid_llm.kernels.registry.facts import Facts


class Waiting:
    """A hook that ends once somebody was told of it, or after `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.said: list[str] = []
        self.told = threading.Event()

    def warning(self, text: str, *parts: object) -> None:
        self.said.append(text % parts)
        self.told.set()

    def hook(self, facts: Facts) -> None:
        self.told.wait(self.limit_s)


def prepared(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> KernelSpec:
    """Have a row made ready whose hook is `waiting`'s."""
    module = ModuleType("a_slow_hook")
    module.prepare = waiting.hook  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(patience, "_log", waiting)
    row = dataclasses.replace(registry.get_row("jit/scale"), prepare="a_slow_hook:prepare")
    assert dispatcher.make_ready(row, Facts("scale", "cpu"), {})
    return row


def test_a_hook_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a process that stands still, and no word on which row's code it waits for."""
    monkeypatch.setattr(patience, "LIMIT_S", 0.01)
    waiting = Waiting(20.0)
    row = prepared(waiting, monkeypatch)
    assert waiting.said == [f"{row.name}: a_slow_hook:prepare has not ended after 0.01 s; calls wait for it"]


def test_a_hook_that_ends_in_time_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a warning long after what it speaks of has ended; a thread that stays for it."""
    before = threading.active_count()
    waiting = Waiting(0.0)
    prepared(waiting, monkeypatch)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer) and thread.function is patience._tell:
            thread.join(20.0)
    assert threading.active_count() <= before
    assert not waiting.said


def test_a_build_that_shows_its_progress_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: two voices about every compile; silence about the next hang of a thread that once built."""
    monkeypatch.setattr(progress, "_terminal", lambda: True)
    monkeypatch.setattr(progress, "_shown", lambda text: True)
    waiting = Waiting(0.0)
    monkeypatch.setattr(patience, "_log", waiting)
    with progress.Progress("building jit/scale"):
        patience._tell("jit/scale: prepare", threading.get_ident())
        assert not waiting.said
    patience._tell("jit/scale: prepare", threading.get_ident())
    assert len(waiting.said) == 1
