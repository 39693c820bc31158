"""One rank of a group whose records of times may differ; run by tests, it prints what it decided, or why it refuses.

python -m tests.kernels.registry.agreement_worker RANK RANKS RENDEZVOUS FOLDER DISTURBED
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch import distributed

from rapid_llm.kernels.registry import dispatch, dispatcher, get_row, lockfile, registry, timing_records
from rapid_llm.kernels.registry.errors import LockError
from rapid_llm.kernels.registry.records import USER
from rapid_llm.kernels.registry.timings import Point, Timing, order
from tests import scratch

ROWS = ("alpha/scratch", "beta/scratch")


def decide(rank: int, folder: Path, disturbed: bool) -> lockfile.Lock:
    """Choose by a table of times of this rank's own, in which its best row is twice as fast, or within noise."""
    sys.path.insert(0, str(folder))
    module = scratch.make_module(folder, "scratch_rows", scratch.MODULE)
    registry.register(scratch.op_spec(), scratch.row("native/scratch", f"{module}:native", priority=0))
    for name, priority in zip(ROWS, (20, 10), strict=True):
        registry.register(scratch.row(name, f"{module}:fast", priority=priority))
        scratch.prove(name)
    ratio = (0.5 if rank % 2 else 2.0) if disturbed else 0.99 + 0.01 * (rank % 3)
    times = {ROWS[0]: Timing(10, 9, 11), ROWS[1]: Timing(10, 9, 11, ratio, ratio * 0.98, ratio * 1.02)}
    point = Point("scratch", "fp32", None, {"tokens": 4, "hidden": 64}, times, order(ROWS, times))
    kind = str(timing_records.device_class("cpu"))
    sources = {name: timing_records.source_of(get_row(name)) for name in ROWS}
    timing_records.write(timing_records.path_of(USER, kind), kind, [point], sources)  # type: ignore[arg-type]
    dispatcher.forget(None)
    dispatch("scratch", device="cpu", dtype="fp32", dims={"tokens": 4, "hidden": 64})
    dispatch("scratch", device="cpu", dtype="fp32", dims={"tokens": 100 + rank, "hidden": 64})  # this rank's own call
    return lockfile.export(dispatcher.decisions())


def main() -> None:
    rank, ranks, rendezvous, folder, disturbed = sys.argv[1:]
    own = Path(folder) / rank
    own.mkdir()
    os.environ["RAPID_LLM_CACHE_DIR"] = str(own)
    distributed.init_process_group("gloo", f"file://{rendezvous}", rank=int(rank), world_size=int(ranks))

    def gather(lock: lockfile.Lock) -> list[lockfile.Lock]:
        found: list[lockfile.Lock] = [lock] * int(ranks)
        distributed.all_gather_object(found, lock)
        return found

    try:
        lockfile.agree(decide(int(rank), own, disturbed == "True"), gather)
        print("agreed")
    except LockError as error:
        print(error)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
