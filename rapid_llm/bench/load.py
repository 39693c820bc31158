"""How busy the machine is with other programs, before and during a measurement.

What counts is CPU time that others took on the CPUs this process may use. The load average is recorded, yet decides
nothing: it remembers our own work for minutes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import MachineBusyError

BUSY_LIMIT = 0.15
"""CPUs' worth of other programs' work above which a measurement is refused."""

PATIENCE_S = 5.0
"""Seconds for which a busy machine is watched before it is refused."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A moment: seconds by the wall, CPU seconds spent on our CPUs by anyone, and by us with our finished children."""

    wall: float
    busy: float | None
    own: float


@dataclass(frozen=True, slots=True)
class Load:
    """others: CPUs' worth of time that other programs took, None where the system does not say. running: tasks that
    were ready to run at the end, ours among them. loadavg: over 1, 5 and 15 minutes."""

    seconds: float
    others: float | None
    running: int | None
    loadavg: tuple[float, float, float] | None

    def json(self) -> dict[str, Any]:
        return asdict(self)


def read_snapshot() -> Snapshot:
    """Now, from /proc/stat and this process's own times."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return Snapshot(time.monotonic(), _busy_seconds(_read("/proc/stat")), own)


class LoadWatch:
    """Measures others' CPU use from its creation to `stop()`."""

    def __init__(self, snapshot: Callable[[], Snapshot] = read_snapshot) -> None:
        self._snapshot = snapshot
        self._start = snapshot()

    def stop(self) -> Load:
        end = self._snapshot()
        seconds = end.wall - self._start.wall
        others = None
        if end.busy is not None and self._start.busy is not None and seconds > 0:
            taken = (end.busy - self._start.busy) - (end.own - self._start.own)
            others = round(taken / seconds, 3) if taken > 0 else 0.0
        return Load(round(seconds, 3), others, _running(_read("/proc/stat")), _loadavg())


def require_idle(
    *,
    limit: float = BUSY_LIMIT,
    window: float = 0.5,
    patience: float = PATIENCE_S,
    force: bool = False,
    snapshot: Callable[[], Snapshot] = read_snapshot,
    sleep: Callable[[float], None] = time.sleep,
) -> Load:
    """Watch the machine for `window` seconds, again for up to `patience` seconds while it is busy.

    Returns the load that was seen. Raises `MachineBusyError` if others still use more than `limit` CPUs, unless
    `force`. Where the system does not tell, nothing is refused and `others` is None.
    """
    waited = 0.0
    while True:
        watch = LoadWatch(snapshot)
        sleep(window)
        load = watch.stop()
        waited += window
        if load.others is None or load.others <= limit or force:
            return load
        if waited >= patience:
            raise MachineBusyError(
                f"other programs use {load.others:.2f} CPUs (limit {limit:.2f}), watched for {waited:.1f} s; "
                "stop them, or pass --force-busy to measure all the same and have the result say so"
            )


def _busy_seconds(stat: str) -> float | None:
    """CPU seconds that are neither idle nor waiting for IO, summed over the CPUs that this process may run on."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    tick = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
    total, seen = 0, False
    for line in stat.splitlines():
        name, *fields = line.split() or [""]
        if not name.startswith("cpu") or name == "cpu" or len(fields) < 5:
            continue
        if allowed is not None and int(name[3:]) not in allowed:
            continue
        values = [int(field) for field in fields[:8]]
        total += sum(values) - values[3] - values[4]
        seen = True
    return total / tick if seen else None


def _running(stat: str) -> int | None:
    for line in stat.splitlines():
        if line.startswith("procs_running"):
            return int(line.split()[1])
    return None


def _loadavg() -> tuple[float, float, float] | None:
    try:
        return os.getloadavg()
    except OSError:  # the system keeps none
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # not Linux, or hidden by a sandbox: the load is then unknown
        return ""
