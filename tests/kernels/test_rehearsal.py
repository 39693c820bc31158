"""Compiling ahead: what a rehearsal makes, and that it leaves no trace."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import rapid_llm.kernels.ops  # noqa: F401  (registers the ops)
from rapid_llm.kernels.ops import rehearsal, triton_support
from rapid_llm.kernels.ops.triton_support import record_launches
from rapid_llm.verify import plain


class _Mode:
    """Stands for Triton's AsyncCompileMode."""

    def __init__(self, executor: Any, *, ignore_errors: bool) -> None:
        assert ignore_errors

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class _Triton:
    AsyncCompileMode = _Mode


class _Compiled:
    """Stands for Triton's compiled kernel, whose binary goes to the device when `run` is read."""

    loads = 0

    @property
    def run(self) -> None:
        self.loads += 1


class _Kernel:
    def __init__(self) -> None:
        self.warmed: list[tuple[Any, ...]] = []
        self.compiled = _Compiled()
        self.__name__ = "kernel"

    def warmup(self, *args: Any, grid: tuple[int, ...], **meta: Any) -> _Compiled:
        self.warmed.append((*args, grid, meta))
        return self.compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise AssertionError("launched during a rehearsal")


def test_launches_are_compiled_not_performed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would go red if a rehearsal ran kernels, or lost their arguments."""
    monkeypatch.setattr(triton_support, "triton", _Triton)
    monkeypatch.setattr(triton_support, "MISSING_REASON", "")
    kernel = _Kernel()
    done = rehearsal.rehearse(lambda: triton_support.launch(kernel, (3,), torch.device("cpu"), 1, 2, BLOCK=16))
    assert done
    assert kernel.warmed == [(1, 2, (3,), {"BLOCK": 16})]
    assert kernel.compiled.loads == 0


def test_kernels_are_loaded_once_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a kernel that is compiled ahead and then loaded within a graph's capture."""
    monkeypatch.setattr(triton_support, "triton", _Triton)
    monkeypatch.setattr(triton_support, "MISSING_REASON", "")
    kernel = _Kernel()

    def calls() -> None:
        for _ in range(2):
            triton_support.launch(kernel, (3,), torch.device("cpu"), 1)

    assert rehearsal.rehearse(calls, load=True, threads=1)
    assert kernel.compiled.loads == 1


def test_other_threads_launch_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a rehearsal that swallows the launches of a thread that is serving."""
    taken: list[str] = []
    triton_support.record_launches(lambda *launch: taken.append("here"))
    try:
        other = threading.Thread(target=lambda: taken.append(str(triton_support.use_triton("scale", torch.ones(1)))))
        other.start()
        other.join()
    finally:
        triton_support.record_launches(None)
    assert taken == ["False"]


def test_recorder_is_gone_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would go red if a failing rehearsal left every later launch unperformed."""
    monkeypatch.setattr(triton_support, "triton", _Triton)
    monkeypatch.setattr(triton_support, "MISSING_REASON", "")

    def fail() -> None:
        raise RuntimeError("out of memory")

    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            rehearsal.rehearse(fail)
        assert not triton_support._recorders
    finally:
        record_launches(None)


def test_without_the_mode_nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton that cannot compile ahead is used as before."""
    monkeypatch.setattr(triton_support, "triton", object())
    assert not rehearsal.rehearse(lambda: plain.scale(None, 1.0))  # type: ignore[arg-type]
