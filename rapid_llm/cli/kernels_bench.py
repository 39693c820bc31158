"""`rapid-llm kernels bench`: times of proven rows, shown or kept as records."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rapid_llm.platform import has_nvidia

from .support import BAD, USAGE, fail, print_json, usage

if TYPE_CHECKING:
    from rapid_llm.tuning.calls import Call
    from rapid_llm.tuning.measure import Result
    from rapid_llm.tuning.session import Selection


def bench(
    names: Sequence[str],
    *,
    trace: Path | None,
    model: str | None,
    dims: Sequence[str],
    dtypes: Sequence[str],
    schemes: Sequence[str],
    device: str | None,
    quick: bool,
    rounds: int,
    seconds: float,
    minutes: float | None,
    write: str,
    watch: bool,
    json: bool,
) -> None:
    """Measure, print, and record if asked; status 1 if nothing was measured."""
    from rapid_llm.tuning import measure, session

    where = device or ("cuda" if has_nvidia() else "cpu")
    selection = session.select(names)
    if watch:
        _watch(selection)
        return
    with usage():
        calls = calls_of(selection, trace, model, dims, dtypes, schemes, where, quick)
        path = session.target(None if write == "none" else write, where)
    if not calls:
        fail("no call to measure: the trace or model makes none of the ops named", USAGE)
    results = list(
        session.run(
            calls,
            where,
            path=path,
            measured=partial(
                measure.measure, rows=selection.rows, unproven=path is None, rounds=rounds, max_seconds=seconds
            ),
            seconds=None if minutes is None else minutes * 60,
            clock=time.perf_counter_ns,
            told=partial(_tell, total=len(calls), quiet=json),
        )
    )
    totals = {**session.summary(results), "written": None if path is None else str(path)}
    if json:
        print_json({"device": measure.device_kind(where), **totals, "results": [r.json() for r in results]})
    else:
        _finish(results, totals)
    if not totals["measured"]:
        raise typer.Exit(BAD)


def calls_of(
    selection: Selection,
    trace: Path | None,
    model: str | None,
    dims: Sequence[str],
    dtypes: Sequence[str],
    schemes: Sequence[str],
    device: str,
    quick: bool,
) -> list[Call]:
    """The calls that the options of a command mean; raises `ValueError` where they cannot be read."""
    if sum((trace is not None, model is not None, bool(dims))) > 1:
        fail("give one of --trace, --model and --dim", USAGE)
    from rapid_llm.kernels.registry import get_op
    from rapid_llm.kernels.registry.timing_records import dims_of
    from rapid_llm.tuning import shapes
    from rapid_llm.tuning.calls import DENSE, Call

    from .kernels import parse_dim

    usual = "bf16" if device.startswith("cuda") else "fp32"
    wanted, kinds = list(dtypes) or [usual], list(schemes) or [DENSE]
    if dims:
        found = dict(map(parse_dim, dims))
        made = []
        for op_id in selection.ops:
            op = get_op(op_id)
            sizes = {name: size for name, size in found.items() if name in dims_of(op)}
            extras = {name: size for name, size in found.items() if name not in sizes}
            scheme = kinds if op.schemes else [None]
            made += [Call(op_id, dtype, s, sizes, extras) for dtype in wanted for s in scheme]
        return made
    if trace is not None:
        listed = shapes.of_trace(trace)
    elif model is not None and model not in shapes.MODELS:
        listed = shapes.to_the_limits(shapes.of_keys(_keys_of_model(model, device, dtypes)))
    else:
        names = [model] if model is not None else list(shapes.MODELS)
        listed = [
            call
            for n in names
            for call in shapes.of_model(shapes.MODELS[n], selection.ops, wanted, kinds, device, quick=quick)
        ]
    return [call for call in dict.fromkeys(listed) if call.op in selection.ops]


def _keys_of_model(model: str, device: str, dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """The keys of everything that a model has bound, for each dtype that is asked for."""
    from .generate import make_llm

    keys = []
    for dtype in dtypes or ["auto"]:
        llm = make_llm(model, {"device": device, "dtype": dtype})
        keys += [handle.decision.facts.as_json() for _, _, handle in llm.bindings()]
    return keys


def _watch(selection: Selection) -> None:
    from rapid_llm.tuning.watch import watch

    if len(selection.rows) != 1:
        fail("--watch needs one row, such as --row jit/rmsnorm", USAGE)
    watch(selection.rows[0], [argument for argument in sys.argv[1:] if argument != "--watch"])


def _tell(result: Result, *, total: int, quiet: bool) -> None:
    """A table of a call as soon as it is measured; only a line of progress where the output is for a program."""
    if quiet:
        print(f"{result.call} (of {total}): {result.failure or 'measured'}", file=sys.stderr)
        return
    from rich.console import Console

    from rapid_llm.bench.sweep import CaseResult
    from rapid_llm.bench.tables import print_case

    call = result.call
    named = {"op": call.op, "dtype": call.dtype, **({"scheme": call.scheme} if call.scheme else {})}
    case = CaseResult({**named, **call.dims, **call.extras}, result.comparison, result.before, {}, result.failure)
    print_case(case, "row", Console(width=None if sys.stdout.isatty() else 160, highlight=False))


def _finish(results: Sequence[Result], totals: dict[str, Any]) -> None:
    """What had no times and why, once each; what changed; what is left to gain."""
    ran = {name for r in results if r.point is not None for name in r.point.rows}
    reasons: dict[str, str] = {}
    for result in results:
        for name, reason in result.missing.items():
            if name not in ran:
                reasons.setdefault(name, reason.strip().splitlines()[-1].strip())
    shown = {name for r in results if r.comparison is not None for name in r.comparison.results}
    for name, reason in sorted(reasons.items()):
        print(f"{name}: {'not to be recorded' if name in shown else 'not measured'}: {reason}")
    if totals["written"] is not None:
        for result in results:
            if result.point is not None and result.before != result.after:
                print(f"{result.call}: {result.after} instead of {result.before}")
        print(f"{totals['measured']} calls written to {totals['written']}; dispatch changes for {totals['changed']}")
    if totals["worst_regret"] is not None:
        print(
            f"{totals['measured']} of {totals['calls']} calls measured; the row that dispatch chooses is at most "
            f"{totals['worst_regret']:.1%} slower than the fastest ({totals['worst_call']})"
        )
    else:
        print(f"0 of {totals['calls']} calls measured")
