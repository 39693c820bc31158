"""What a person at a terminal sees of a build or a wait; everyone else finds it in the log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType
from typing import Final

from rapid_llm.kernels.registry import patience

_log: Final = logging.getLogger("rapid_llm.kernels.build")


_line: Final = threading.Lock()


def tell(text: str) -> None:
    """Something a waiting person should know: on the terminal if there is one, else a warning in the log."""
    if _terminal() and _shown(f"{text}\n"):
        _log.info("%s", text)
    else:
        _log.warning("%s", text)


def _terminal() -> bool:
    """Whether a person may be looking. Standard error may be closed, None (a daemon), or anything (a notebook)."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def _shown(text: str) -> bool:
    """Write to the terminal; False where it has gone (a closed connection): no build depends on it."""
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        return False
    return True


class Progress:
    """One line on the terminal with the time elapsed, rewritten each second and wiped at the end.

    Of several at once, the first has the line; the others are in the log alone.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.started = time.monotonic()
        self._ended = threading.Event()
        self._writer: threading.Thread | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def _write(self) -> None:
        while not self._ended.wait(1.0):
            self._show()

    def _show(self) -> None:
        _shown(f"\r{self.what} ... {self.seconds:.0f} s")

    def __enter__(self) -> Progress:
        _log.info("%s", self.what)
        if _terminal() and _line.acquire(blocking=False):
            self._show()
            writer = threading.Thread(target=self._write, name="rapid-llm-progress", daemon=True)
            try:
                writer.start()
                self._writer = writer
                patience.speaking(True)
            except RuntimeError:  # no more threads for this user: the line stays as it is
                _line.release()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._writer is not None:
            patience.speaking(False)
            self._ended.set()
            self._writer.join()
            _shown("\r\x1b[K")
            _line.release()
        _log.info("%s: %s after %.1f s", self.what, "failed" if kind else "done", self.seconds)
