"""The process that `benchmarks.load` starts: loads a model once and prints, as JSON, what that took.

Linux only: memory is read from /proc.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE_KB = 1024


def main(path: str, dtype: str) -> None:
    import torch

    with open(path, "rb") as file:
        while file.read(1 << 24):
            pass
    del file
    before = {name: status(name) for name in ("VmRSS", "private")}
    Path("/proc/self/clear_refs").write_text("5")  # the highest starts again from here

    from rapid_llm.engine.clock import now

    begin = now()
    from rapid_llm.engine import llm as engine
    from rapid_llm.engine import loading

    imported = now()
    marks: list[float] = []
    build = loading.Decoder

    def marked(*args: Any, **kwargs: Any) -> Any:
        marks.append(now())
        made = build(*args, **kwargs)
        marks.append(now())
        return made

    loading.Decoder = marked  # type: ignore[assignment,misc]
    start = now()
    llm = engine.LLM(path, dtype=dtype, device="cpu")
    end = now()
    seconds = {
        "import": imported - begin,
        "read": marks[0] - start,
        "prepare": marks[1] - marks[0],
        "whole": end - start,
    }
    found = {
        "stays": status("VmRSS") - before["VmRSS"],
        "own": status("private") - before["private"],
        "peak": status("VmHWM") - before["VmRSS"],
    }
    print(json.dumps({"seconds": seconds, "bytes": found, "memory": llm.explain().memory, "torch": torch.__version__}))


def status(name: str) -> int:
    """Bytes of this process by the kernel's account: VmRSS, VmHWM, or `private`, pages that no other process shares."""
    file = "smaps_rollup" if name == "private" else "status"
    wanted = ("Private_Clean", "Private_Dirty") if name == "private" else (name,)
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return sum(int(line.split()[1]) * PAGE_KB for line in lines if line.partition(":")[0] in wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
