"""How long SmolLM2 takes to load and how much memory that keeps, in fresh processes: `python -m benchmarks.load`.

A process imports torch, reads the file once so that it lies in the page cache, and makes an `LLM` of it. Time is that
of reading configuration, tokenizer and weights; of choosing and preparing rows; and of the whole. Memory is resident
memory beyond what `import torch` left, as a multiple of the file: what stays, what of it is this process's own (a page
of a library or file that others could share is not), and the highest on the way.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from rapid_llm.bench import Figure

from . import common

MODULE = "benchmarks.load"
SECONDS: Final = 0.5
MULTIPLE: Final = 1.6


def main(arguments: list[str] | None = None) -> int:
    made = common.parser(MODULE, "Time and memory of loading SmolLM2.")
    made.add_argument("--model", default="smollm2-135m-instruct", help="a name or a GGUF file")
    made.add_argument("--dtype", default="auto", help="of the engine (default: %(default)s)")
    options = made.parse_args(arguments)
    run = common.start("load", MODULE, options)

    from rapid_llm.models.hub import resolve_model

    path = resolve_model(options.model)
    samples = [sample(path, options.dtype) for _ in range(3 if options.quick else 9)]
    run.extra["samples"] = samples
    run.extra["file_bytes"] = path.stat().st_size
    report(run, samples, path.stat().st_size)
    return common.finish(run, f"Loading {path.name}, dtype {options.dtype}", options)


def sample(path: Path, dtype: str) -> dict[str, Any]:
    """What one fresh process finds."""
    command = [sys.executable, "-m", "benchmarks.load_process", str(path), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"load: the process that loads failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(run: Any, samples: list[dict[str, Any]], nbytes: int) -> None:
    """Medians; of the times, the samples beside them."""
    targets = {"read": SECONDS, "whole": None, "prepare": None, "import": None}
    names = {
        "read": "configuration, tokenizer and weights",
        "prepare": "rows chosen and weights packed for them",
        "whole": "LLM(...) as a whole",
        "import": "import rapid_llm.engine.llm, torch being there",
    }
    for key, target in targets.items():
        values = [s["seconds"][key] for s in samples]
        detail = {"samples": values}
        run.add(Figure(names[key], statistics.median(values), "s", at_most=target, detail=detail))
    for key, name in (("stays", "resident, stays"), ("own", "resident, own"), ("peak", "resident, highest")):
        value = statistics.median(s["bytes"][key] for s in samples) / nbytes
        run.add(Figure(name, value, "x the file", at_most=MULTIPLE if key == "stays" else None))


if __name__ == "__main__":
    sys.exit(main())
