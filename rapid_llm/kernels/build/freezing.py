"""Whether compiling is still allowed in this process, and how often it happened."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from rapid_llm.kernels.registry.forking import Lock

from .errors import FrozenError


@dataclass(slots=True)
class Counters:
    """compiles: compilers started by `build`. hits: artifacts found ready. kernels: Triton kernels that were compiled,
    or loaded from Triton's own cache, for arguments of a new kind. Read them; who builds counts."""

    compiles: int = 0
    hits: int = 0
    kernels: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False)

    def count(self, name: str) -> None:
        """Add one to `compiles`, `hits` or `kernels`."""
        with self._lock:
            setattr(self, name, getattr(self, name) + 1)
        seen = _watched.get()
        if seen is not None:
            seen.append(name)


_watched: Final[ContextVar[list[str] | None]] = ContextVar("rapid_llm_watched_builds", default=None)
counters = Counters()
_frozen = threading.Event()


@contextmanager
def watch() -> Iterator[list[str]]:
    """The names that are counted within the block by this thread, as they come."""
    seen: list[str] = []
    token = _watched.set(seen)
    try:
        yield seen
    finally:
        _watched.reset(token)


def freeze() -> None:
    """From now on a compile is a `FrozenError`; what is built already still loads."""
    _frozen.set()


def thaw() -> None:
    """Allow compiles again."""
    _frozen.clear()


def frozen() -> bool:
    """Whether `freeze()` holds."""
    return _frozen.is_set()


def check_thawed(what: object) -> None:
    """Raise unless a compile is allowed."""
    if frozen():
        raise FrozenError(f"{what} is not built, and kernels are frozen: prepare() must build it before freeze()")
