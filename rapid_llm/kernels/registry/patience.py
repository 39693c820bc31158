"""Names what a first call waits for, where nothing else does: whoever sees a process stand still is to learn why.

Dispatch holds its lock while a row's code is imported and prepared, and foreign code may hang there for ever. A build
that writes its progress to the terminal speaks for itself, and is left to.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

LIMIT_S: Final = 5.0
"""After so long a person wonders."""

_log = logging.getLogger(__name__)
_speaking: Final[set[int]] = set()


@contextmanager
def named(what: str) -> Iterator[None]:
    """Should the block take longer than `LIMIT_S`, warn once that calls wait for `what`."""
    timer = threading.Timer(LIMIT_S, _tell, (what, threading.get_ident()))
    timer.daemon = True
    with suppress(RuntimeError):  # no more threads for this user: it stays unsaid
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def speaking(now: bool) -> None:
    """This thread's work tells a person of its progress from now on, or no longer."""
    (_speaking.add if now else _speaking.discard)(threading.get_ident())


def _tell(what: str, thread: int) -> None:
    if thread not in _speaking:
        _log.warning("%s has not ended after %g s; calls wait for it", what, LIMIT_S)
