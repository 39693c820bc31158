"""What a person at a terminal sees of a build or a wait; everyone else finds it in the log."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Final

_log: Final = logging.getLogger("rapid_llm.kernels.build")


def tell(text: str) -> None:
    """Something a waiting person should know: on the terminal if there is one, else a warning in the log."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
        _log.info("%s", text)
    else:
        _log.warning("%s", text)


class Progress:
    """One line on the terminal with the time elapsed, rewritten each second and wiped at the end."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.started = time.monotonic()
        self._shown = -1
        self._terminal = sys.stderr.isatty()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def tick(self) -> None:
        """Called often; writes at most once a second."""
        if self._terminal and int(self.seconds) > self._shown:
            self._shown = int(self.seconds)
            print(f"\r{self.what} ... {self._shown} s", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        _log.info("%s", self.what)
        self.tick()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        _log.info("%s: %s after %.1f s", self.what, "failed" if kind else "done", self.seconds)
