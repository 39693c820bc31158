"""A process that forks while one of its threads is busy in here: the child is not to wait for a thread it hasn't."""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
import threading
import traceback
from collections.abc import Callable
from types import ModuleType

import pytest

import rapid_llm.kernels
from rapid_llm.kernels.registry import forking
from rapid_llm.kernels.registry.forking import Lock

_BRIEF = {"build.progress", "registry.canary", "registry.evidence", "registry.records", "registry.tile_records"}
_BRIEF |= {"registry.timing_records"}
"""Modules whose plain locks nobody waits for, or that are held while one file is read and never during a build."""


def in_child(call: Callable[[], None]) -> int:
    """The exit status of a forked child that calls `call`; a child that waits for ever is ended by the alarm."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            signal.alarm(20)
            call()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def modules() -> list[ModuleType]:
    """Every module of the kernels' machinery."""
    found = []
    for info in pkgutil.walk_packages(rapid_llm.kernels.__path__, "rapid_llm.kernels."):
        if not {"backend", "ops"} & set(info.name.split(".")):  # rows: some import only where their library is
            found.append(importlib.import_module(info.name))
    return found


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_finds_every_lock_free_whoever_held_it() -> None:
    """P38: a fork (a data loader's worker) during another thread's build: the child's first dispatch hangs for ever."""
    everywhere = modules()
    locks = list(forking._all)
    assert {module._lock for module in everywhere if isinstance(getattr(module, "_lock", None), Lock)} <= set(locks)
    held, ended = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.__enter__()
        held.set()
        ended.wait()
        for lock in locks:
            lock.__exit__(None, None, None)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def take_all() -> None:
        for lock in locks:
            with lock, lock:
                pass

    try:
        assert in_child(take_all) == 0
    finally:
        ended.set()
        thread.join()
    take_all()  # and the parent's are the parent's


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_who_forks_within_a_lock_still_holds_it() -> None:
    """Catches a lock renewed under its owner, whose `with` then ends in an error."""
    lock = Lock()
    with lock:
        assert in_child(lambda: lock.__exit__(None, None, None)) == 0


def test_no_lock_of_a_module_outlives_a_fork() -> None:
    """Catches a new lock of the plain kind, of which the same could be said."""
    kinds = (type(threading.Lock()), type(threading.RLock()))
    plain = {
        f"{module.__name__}.{name}"
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, kinds) and module.__name__.removeprefix("rapid_llm.kernels.") not in _BRIEF
    }
    assert not plain
