"""Whether somebody else uses the GPU that is to be measured; of CPUs, `rapid_llm.bench.load` knows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from rapid_llm.bench.errors import MachineBusyError
from rapid_llm.bench.load import PATIENCE_S

LIMIT: Final = 5
"""Percent of the time in which kernels of any program ran, above which a GPU counts as busy."""

LOOKS: Final = 4
PAUSE_S: Final = 0.25


def require_idle_device(
    device: Any, *, force: bool = False, patience: float = PATIENCE_S, sleep: Callable[[float], None] = time.sleep
) -> int | None:
    """The highest of a few readings of the device's use, in percent, before this process has used it; None where it
    does not tell, as a CPU does not.

    Raises `MachineBusyError` if it stays above `LIMIT` for `patience` seconds, unless `force`.
    """
    read: Callable[[], int | None] | None = getattr(device, "utilisation", None)
    if read is None:
        return None
    waited = 0.0
    while True:
        seen = [_look(read, sleep) for _ in range(LOOKS)]
        waited += LOOKS * PAUSE_S
        known = [value for value in seen if value is not None]
        used = max(known, default=None)
        if used is None or used <= LIMIT or force:
            return used
        if waited >= patience:
            raise MachineBusyError(
                f"other programs keep {device.name} busy for {used} % of the time (limit {LIMIT} %), watched for "
                f"{waited:.1f} s; stop them, or pass --force-busy to measure all the same and have the result say so"
            )


def _look(read: Callable[[], int | None], sleep: Callable[[float], None]) -> int | None:
    sleep(PAUSE_S)
    return read()
