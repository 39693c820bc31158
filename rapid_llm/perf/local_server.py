"""A server of this package in a process of its own, for as long as a load needs it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Final

from rapid_llm.bench.errors import BenchError

READY: Final = re.compile(r": (http://\S+) \(Ctrl-C ends\)")
START_S: Final = 900.0
STOP_S: Final = 60.0
LINES: Final = 20
"""Of the server's last words that an error repeats."""


class ServerError(BenchError):
    """The server did not start, or ended by itself; the text holds its last words."""

    code = "server"


def command(shape: str | None, model: str | None, options: Mapping[str, Any]) -> list[str]:
    """`rapid-llm serve` on a free port. options: of the engine, by the names of its fields."""
    words = [sys.executable, "-m", "rapid_llm.cli", "serve", "--port", "0", "--log-level", "warning"]
    words += ["--shape", shape] if shape is not None else []
    words += ["--model", model] if model is not None else []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


@contextlib.contextmanager
def running(words: Sequence[str], *, start_seconds: float = START_S) -> Iterator[str]:
    """The address of a server that `words` start. It is ended behind the block, and waited for.

    Raises `ServerError` if it does not say within `start_seconds` that it listens.
    """
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    heard = _Listener(process.stderr)
    try:
        yield heard.address(process, start_seconds)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        heard.join()


class _Listener:
    """Reads what a server says, so that it never waits for a reader."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        self._stream = stream
        self._last: deque[str] = deque(maxlen=LINES)
        self._found = threading.Event()
        self._url: str | None = None
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def address(self, process: subprocess.Popen[bytes], seconds: float) -> str:
        self._found.wait(seconds)
        if self._url is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            how = f"ended with status {process.returncode}" if process.returncode is not None else "is not ready"
            raise ServerError(f"the server {how} after at most {seconds:g} s; it said:\n{''.join(self._last).rstrip()}")
        return self._url

    def join(self) -> None:
        self._thread.join(STOP_S)

    def _listen(self) -> None:
        for line in self._stream or ():
            text = line.decode(errors="replace")
            self._last.append(text)
            if (match := READY.search(text)) and self._url is None:
                self._url = match[1]
                self._found.set()
        self._found.set()
