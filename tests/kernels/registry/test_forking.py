"""A process that forks while one of its threads is busy in here: the child is not to wait for a thread it hasn't."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import rapid_llm.kernels
from rapid_llm.kernels.registry import forking
from rapid_llm.kernels.registry.forking import Lock

MODULES = ("threading", "_thread", "multiprocessing")
PLAIN = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier", "allocate_lock"}
REASONS = {
    "kernels/registry/forking.py": "makes the locks that a child finds free",
    "kernels/build/progress.py": "nobody waits for the line of the terminal: it is taken if free, or not at all",
    "engine/core.py": "an engine is of the process that made it: its caches are on devices that a child cannot use",
    "engine/parallel.py": "so are the ranks that compute with it",
    "server/async_engine.py": "so is the thread that drives it",
    "kernels/ops/gemm/linear_cublas.py": "it is taken for products on a GPU alone, which a forked child cannot use",
}
"""Files that name a plain lock, and why no child waits for it."""


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


def plain_locks(source: str) -> set[str]:
    """The makers of plain locks that a module's source names, in calls and as default factories alike."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)) if any(module in source for module in MODULES) else ():
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found |= {name.name for name in node.names} & PLAIN
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in PLAIN:
            found |= {node.attr} if node.value.id in MODULES else set()
    return found


def test_every_lock_of_the_package_is_free_in_a_child() -> None:
    """Catches: a plain lock, of a module or of an object, which a fork while it is held leaves held for ever."""
    root = Path(rapid_llm.kernels.__path__[0]).parent
    named = {path.relative_to(root).as_posix(): plain_locks(path.read_text()) for path in root.rglob("*.py")}
    assert {name for name, kinds in named.items() if kinds} == set(REASONS), "take registry.forking.Lock"


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("lock = threading.Lock()", {"Lock"}),
        ("lock: Lock = field(default_factory=threading.RLock)", {"RLock"}),
        ("def f():\n    from threading import Condition", {"Condition"}),
        ("from .forking import Lock\nlock = Lock()", set()),
        ("event = threading.Event()", set()),
    ],
)
def test_plain_locks_are_seen(source: str, kinds: set[str]) -> None:
    """Catches: a way to make one that the test above would pass over."""
    assert plain_locks(source) == kinds
