"""What this machine's memory gives to readers: the ceiling beside which every bandwidth-bound figure is read.

Several read-only operations pass over a buffer far larger than the last cache; the fastest of them is the figure, since
whatever one operation reaches, the memory can do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import ResolutionError
from .host import Clock

LEAST_BYTES = 256 << 20
CACHE_MULTIPLE = 4


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """bytes_per_second: of the best pass. by: the operation that reached it. Buffer size and thread count beside it."""

    bytes_per_second: float
    by: str
    buffer_bytes: int
    threads: int

    def json(self) -> dict[str, Any]:
        return asdict(self)


def read_bandwidth(
    *,
    rounds: int = 5,
    buffer_bytes: int | None = None,
    passes: Mapping[str, Callable[[], object]] | None = None,
    clock: Clock = time.perf_counter_ns,
) -> Bandwidth:
    """Read bandwidth in bytes a second with torch's current number of threads; about 0.3 s.

    buffer_bytes: by default the larger of 256 MiB and four times the last cache. passes: name -> a function that reads
    the buffer once, torch reductions by default. Raises `ResolutionError` if a pass takes no time.
    """
    import torch

    if rounds < 1:
        raise ValueError(f"rounds={rounds}: at least 1")
    size = buffer_bytes if buffer_bytes is not None else max(LEAST_BYTES, CACHE_MULTIPLE * last_cache_bytes())
    if passes is None:
        size = max(size - size % 4096, 4096)
        buffer = torch.ones(size // 4)
        rows, whole = buffer.view(64, -1), buffer.view(torch.int64)
        passes = {
            "sum of rows": lambda: rows.sum(1),
            "sum of integers": lambda: whole.sum(),
            "dot": lambda: torch.dot(buffer, buffer),
        }
    best, by = 0.0, ""
    for _ in range(rounds + 1):  # the first round also pays for page faults, and never wins
        for name, read in passes.items():
            start = clock()
            read()
            spent = clock() - start
            if spent <= 0:
                raise ResolutionError(f"{name!r} over {size} bytes took no time by this clock; use a larger buffer")
            if size * 1e9 / spent > best:
                best, by = size * 1e9 / spent, name
    return Bandwidth(best, by, size, torch.get_num_threads())


def last_cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the largest cache that CPU 0 sees; 32 MiB where the system does not tell."""
    sizes = []
    for path in root.glob("index*/size"):
        try:
            text = path.read_text().strip()
        except OSError:  # listed yet unreadable: no different from absent
            continue
        scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        if digits.isdigit():
            sizes.append(int(digits) * scale)
    return max(sizes, default=32 << 20)
