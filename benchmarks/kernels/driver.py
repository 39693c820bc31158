"""The command line of every kernel benchmark: `python -m benchmarks.kernels.<op> [--quick] [--compare FILE]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rapid_llm.bench import BenchError, Run, machine_slug, write_json
from rapid_llm.bench.digests import source_digest
from rapid_llm.bench.previous import SCHEMA, compared, load
from rapid_llm.bench.results import RESULTS
from rapid_llm.bench.rows import ROUNDS
from rapid_llm.bench.sweep import Benchmark, CaseResult, environment
from rapid_llm.bench.tables import environment_text, print_case, print_missing, print_sweep
from rapid_llm.kernels import registry


def parser(sweep: Benchmark) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.kernels.{sweep.name}",
        description=f"Every row of {sweep.op} that runs here, torch, and the peers installed. Times are cold.",
    )
    made.add_argument("--quick", action="store_true", help="few cases: a look, not a result to quote")
    made.add_argument("--compare", type=Path, metavar="FILE", help="an earlier result; exits with 1 where slower")
    made.add_argument("--out", type=Path, default=RESULTS / "kernels", metavar="DIR", help="where results go")
    made.add_argument("--device", help="cuda, cuda:N or cpu (default: cuda where torch sees one)")
    made.add_argument("--rows", metavar="A,B", default="", help="only these arms, and the row that dispatch chooses")
    made.add_argument("--rounds", type=int, default=ROUNDS, help="rounds for each case (default: %(default)s)")
    made.add_argument("--seconds", type=float, default=5.0, help="time for each case (default: %(default)s)")
    made.add_argument("--warm", action="store_true", help="one copy of the arguments, which stays in the cache")
    made.add_argument("--no-plots", action="store_true", help="no pictures")
    made.add_argument("--force-busy", action="store_true", help="measure on a busy CPU; the result says so")
    return made


def main(sweep: Benchmark, arguments: list[str] | None = None) -> int:
    """Measure, print, write `<out>/<op>-<machine>.json`; 1 if `--compare` finds an arm slower, 2 if nothing was
    measured."""
    from rich.console import Console

    options = parser(sweep).parse_args(arguments)
    earlier = None
    if options.compare is not None:
        try:
            earlier = load(options.compare)
        except ValueError as error:
            sys.exit(str(error))
    device = options.device or _default_device()
    run = _start(sweep, device, options)
    console = Console(width=None if sys.stdout.isatty() else 180)
    facts = environment(device)
    console.print(environment_text(facts), style="dim", markup=False, soft_wrap=True)
    cases: list[CaseResult] = []
    only = [name for name in options.rows.split(",") if name]
    settings: dict[str, Any] = {"rounds": options.rounds, "max_seconds": options.seconds, "cold": not options.warm}
    for case in sweep.run(device, quick=options.quick, only=only, **settings):
        print_case(case, sweep.line_arg, console)
        cases.append(case)
    print_sweep(cases, console)
    print_missing(cases, console)
    path = write_json(_path(sweep, options), _record(sweep, run, options, facts, cases))
    console.print(f"written to {path}")
    if not options.no_plots:
        _plot(sweep, cases, facts, path, console)
    slow = False
    for change in compared(cases, earlier) if earlier is not None else ():
        console.print(str(change), markup=False)
        slow = slow or change.verdict == "SLOW"
    if not any(case.comparison for case in cases):
        return 2
    return 1 if slow else 0


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _start(sweep: Benchmark, device: str, options: argparse.Namespace) -> Run:
    command = " ".join(["python -m", f"benchmarks.kernels.{sweep.name}", *(["--quick"] if options.quick else [])])
    on_cpu = device == "cpu"
    try:
        return Run(
            f"kernels-{sweep.name}",
            command=command,
            force_busy=options.force_busy or not on_cpu,  # another program on the host does not slow a GPU
            threads_checked=on_cpu,
        )
    except BenchError as error:
        sys.exit(f"{sweep.name}: {error}")


def _path(sweep: Benchmark, options: argparse.Namespace) -> Path:
    suffix = "-quick" if options.quick else ""
    folder: Path = options.out
    return folder / f"{sweep.name}-{machine_slug()}{suffix}.json"


def _record(
    sweep: Benchmark, run: Run, options: argparse.Namespace, facts: dict[str, Any], cases: list[CaseResult]
) -> dict[str, Any]:
    rows = {name for case in cases if case.comparison for name in case.comparison.results if "/" in name}
    return {
        **run.record(),
        "kernel_schema": SCHEMA,
        "op": sweep.op,
        "quick": options.quick,
        "environment": facts,
        "digests": {name: source_digest(registry.get_row(name)) for name in sorted(rows)},
        "cases": [case.json() for case in cases],
    }


def _plot(sweep: Benchmark, cases: list[CaseResult], facts: dict[str, Any], path: Path, console: Any) -> None:
    from rapid_llm.bench.plots import plot_sweep, print_roofline

    print_roofline(cases, facts, console)
    for made in plot_sweep(sweep, cases, facts, path):
        console.print(f"written to {made}")
