"""Time a row again whenever its source changes, each time in a process of its own that knows nothing of the old code.

Sources are looked at by the digest that evidence goes by, so a comment in Python starts nothing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import digest

POLL_SECONDS: Final = 0.5


def source_digest(row: str) -> str | None:
    """The digest of a row's source as it is on disk; None while it cannot be parsed, as in the middle of an edit."""
    spec = registry.get_row(row)
    try:
        source = digest.source_of(spec, registry.get_op(spec.op))
    except SyntaxError:
        return None
    return None if source is None else source.digest + source.extension


def changes(row: str, *, look: Callable[[str], str | None], pause: Callable[[], object]) -> Iterator[str]:
    """A digest at once, and one after every change of the row's source, for ever; pauses between two looks."""
    seen: str | None = None
    while True:
        now = look(row)
        if now is not None and now != seen:
            seen = now
            yield now
        pause()


def watch(row: str, arguments: Sequence[str]) -> None:
    """Run `rapid-llm ARGUMENTS` in a process of its own now and after every change, until interrupted."""
    for found in changes(row, look=source_digest, pause=lambda: time.sleep(POLL_SECONDS)):
        print(f"{row} as of source {found[:12]}:", flush=True)
        subprocess.run([sys.executable, "-m", "rapid_llm.cli", *arguments], check=False)
        print("waiting for a change; Ctrl-C ends", flush=True)
