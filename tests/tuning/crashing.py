"""Work for children of a search, some of which take their process with them."""

from __future__ import annotations

import os
from typing import Any

from rapid_llm.kernels.registry.timings import Timing
from rapid_llm.tuning.tiles import Question, Task, Trial
from rapid_llm.verify import pool

QUESTION = Question("rmsnorm", {"hidden": 64, "itemsize": 4}, {"BLOCK": 64, "BLOCKS": 1, "num_warps": 1})


def start(lock: Any) -> None:
    """Nothing to make ready."""


def work(task: Task) -> pool.Done:
    """Two warps crash, four fail, eight are fast but for BLOCK 128, which crashes too."""
    warps = task.meta.get("num_warps", 1)
    if warps == 2 or task.meta.get("BLOCK") == 128:
        os.abort()
    if warps == 4:
        return pool.Done(Trial(task.meta, failure="wrong_result: off by one"), last=True)
    ratio = 0.5 if warps == 8 else 1.0
    return pool.Done("" if task.kind == "prove" else Trial(task.meta, Timing(ratio, ratio, ratio, ratio, ratio, ratio)))


def children(tasks: Any) -> list[Any]:
    """As `tiles.children`, with the work above."""
    return list(pool.run(tasks, work, start, jobs=1, limit_s=60))
