"""Detects a process in which every multi-threaded operation is slow, whatever its size.

Seen once on a shared machine: each threaded operation took about 8 ms for a whole run, a hundred times its cost.
Figures from such a process are worthless, and nothing in them shows it. A known operation does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .errors import SlowThreadsError
from .host import Clock
from .summary import Summary, summarise

LIMIT_MS = 3.0
"""An addition of 2 x 1 MiB takes well under 1 ms on any machine of this century."""


def require_normal_threads(
    op: Callable[[], object] | None = None,
    *,
    limit_ms: float = LIMIT_MS,
    tries: int = 3,
    samples: int = 15,
    pause: float = 1.0,
    clock: Clock = time.perf_counter_ns,
    sleep: Callable[[float], None] = time.sleep,
) -> Summary:
    """Time a small threaded operation (an addition of 2^18 floats by torch, or `op`); returns its milliseconds.

    Raises `SlowThreadsError` if the median of `samples` stays above `limit_ms` in `tries` tries, `pause` seconds apart.
    """
    run = op if op is not None else _torch_addition()
    run()
    for attempt in range(tries):
        if attempt:
            sleep(pause)
        times = []
        for _ in range(samples):
            start = clock()
            run()
            times.append((clock() - start) / 1e6)
        summary = summarise(times)
        if summary.median <= limit_ms:
            return summary
    raise SlowThreadsError(
        f"a small threaded operation takes {summary.median:.2f} ms (limit {limit_ms:g} ms) in {tries} tries: threads "
        "of this process wait for each other; start again, with fewer threads or on a quieter machine"
    )


def _torch_addition() -> Callable[[], object]:
    import torch

    a, b, out = torch.ones(1 << 18), torch.ones(1 << 18), torch.empty(1 << 18)
    return lambda: torch.add(a, b, out=out)
