"""Locks that a forked child finds free, whatever the threads of its parent were doing.

A fork takes along the thread that forks and no other, but every lock as it is: one that another thread held, during a
build of a minute, say, would be held in the child for ever. Every lock of this package that lives as long as the
process is one of these.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Final

_all: Final[weakref.WeakSet[Lock]] = weakref.WeakSet()


class Lock:
    """A reentrant lock, for `with`."""

    __slots__ = ("__weakref__", "_inner")

    def __init__(self) -> None:
        self._inner = threading.RLock()
        _all.add(self)

    def __enter__(self) -> Lock:
        self._inner.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._inner.release()

    def _renew(self) -> None:
        """In a child: a lock that is neither free nor held by the thread that forked has no owner any more."""
        if self._inner.acquire(blocking=False):
            self._inner.release()
        else:
            self._inner = threading.RLock()


def _renew_all() -> None:
    for lock in list(_all):
        lock._renew()


os.register_at_fork(after_in_child=_renew_all)
