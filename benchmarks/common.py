"""What every benchmark's command line shares: its options, its result file, its table and its exit status."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rapid_llm.bench import BenchError, Run, print_figures, result_path, write_json
from rapid_llm.bench.load import PATIENCE_S
from rapid_llm.bench.results import RESULTS


def parser(module: str, description: str) -> argparse.ArgumentParser:
    """Options that all benchmarks take."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    made.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the result file goes")
    made.add_argument("--force-busy", action="store_true", help="measure on a busy machine; the result says so")
    made.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="S",
        help="wait so long for a quiet machine (%(default)g s)",
    )
    made.add_argument("--quick", action="store_true", help="fewer repeats: a look, not a result to quote")
    return made


def start(name: str, module: str, options: argparse.Namespace) -> Run:
    """A run of benchmark `name`; ends the program with a message where the machine cannot be trusted."""
    flags = [f"--{flag.replace('_', '-')}" for flag in ("force_busy", "quick") if getattr(options, flag)]
    try:
        command = " ".join([f"python -m {module}", *flags])
        return Run(name, command=command, force_busy=options.force_busy, patience=options.patience)
    except BenchError as error:
        sys.exit(f"{name}: {error}")


def finish(run: Run, title: str, options: argparse.Namespace) -> int:
    """Write the result file and print the table; 1 if a target was missed, else 0."""
    record = run.record()
    path = write_json(result_path(run.name, options.results), {**record, "quick": options.quick})
    print_figures(title, run.figures, record)
    print(f"written to {path}")
    return 1 if run.missed else 0
