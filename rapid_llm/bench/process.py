"""What a fresh process costs: the wall time of a command, an import, and calls that happen only once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from .host import Clock
from .summary import Summary, summarise


def first_call(fn: Callable[[], object], clock: Clock = time.perf_counter_ns) -> int:
    """Nanoseconds of one single call, for work that a process does once; repeat it over processes."""
    start = clock()
    fn()
    return clock() - start


def bench_process(
    command: Sequence[str],
    *,
    runs: int = 10,
    environment: Mapping[str, str] | None = None,
    clock: Clock = time.perf_counter_ns,
) -> Summary:
    """Milliseconds by the wall of `command`, over `runs` runs after one that fills the file cache.

    environment: added to this process's own. Raises `subprocess.CalledProcessError`, with the output, if it fails.
    """
    env = {**os.environ, **(environment or {})}

    def once() -> float:
        start = clock()
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, env=env)
        return (clock() - start) / 1e6

    once()
    return summarise(once() for _ in range(runs))


def import_time(module: str, *, runs: int = 10) -> Summary:
    """Cumulative milliseconds of `import module` in a fresh interpreter, by Python's own `-X importtime`."""
    command = [sys.executable, "-X", "importtime", "-c", f"import {module}"]
    return summarise(_cumulative_ms(_stderr(command), module) for _ in range(runs))


def _stderr(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stderr


def _cumulative_ms(text: str, module: str) -> float:
    """The cumulative column of `module` in importtime's lines, `import time: self [us] | cumulative | name`."""
    for line in text.splitlines():
        fields = [field.strip() for field in line.removeprefix("import time:").split("|")]
        if len(fields) == 3 and fields[2] == module:
            return int(fields[1]) / 1000
    raise ValueError(f"-X importtime did not report {module!r}: was it imported before?")
