"""How many compilers may run at once: what MAX_JOBS, the CPUs granted, and the memory that is left allow."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

from rapid_llm.platform import cpu_info

from .errors import BuildError

_PROC: Final = Path("/proc")
_CGROUP: Final = Path("/sys/fs/cgroup")


def jobs(bytes_per_job: int = 2 << 30) -> int:
    """At least 1. MAX_JOBS lowers it and never raises it above what memory allows."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    limits = [affinity]
    quota = cpu_info().quota
    if quota is not None:
        limits.append(math.ceil(quota))
    memory = free_memory()
    if memory is not None:
        limits.append(memory // bytes_per_job)
    given = os.environ.get("MAX_JOBS", "").strip()
    if given:
        if not (given.isascii() and given.isdigit() and int(given) > 0):
            raise BuildError(f"MAX_JOBS={given!r}: use a whole number of at least 1, or unset it")
        limits.append(int(given))
    return max(1, min(limits))


def free_memory(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that can be had without swapping or being killed: the machine's, and each control group's above us."""
    found = [_available(proc / "meminfo")]
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            found += [_left(folder, "memory.max", "memory.current", "inactive_file") for folder in _up(cgroup, path)]
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += [_left(folder, *names) for folder in _up(cgroup / "memory", path)]
    known = [value for value in found if value is not None]
    return max(0, min(known)) if known else None


def _up(root: Path, path: str) -> list[Path]:
    """The group's folder and all above it; inside a container, where the path may not exist, the root remains."""
    folders, folder = [root], root
    for name in path.strip("/").split("/"):
        folder = folder / name
        folders.append(folder)
    return folders


def _left(folder: Path, limit: str, used: str, reclaimable: str) -> int | None:
    most, now = _read(folder / limit).strip(), _read(folder / used).strip()
    if not most.isdigit() or not now.isdigit():
        return None
    free = next((int(v) for k, _, v in _pairs(folder / "memory.stat") if k == reclaimable), 0)
    return int(most) - int(now) + free


def _pairs(path: Path) -> list[tuple[str, str, str]]:
    return [line.partition(" ") for line in _read(path).splitlines()]


def _available(path: Path) -> int | None:
    for line in _read(path).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another system, or hidden: no limit is known from there
        return ""
