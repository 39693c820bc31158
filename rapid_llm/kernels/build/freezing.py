"""Whether compiling is still allowed in this process, and how often it happened."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from .errors import FrozenError


@dataclass(slots=True)
class Counters:
    """compiles: compilers started by `build`. hits: artifacts found ready. Read them; `build` alone counts."""

    compiles: int = 0
    hits: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, name: str) -> None:
        """Add one to `compiles` or `hits`."""
        with self._lock:
            setattr(self, name, getattr(self, name) + 1)


counters = Counters()
_frozen = threading.Event()


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
