"""`rapid-llm bench`: tokens a second of a whole engine, as a table for people and as JSON."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from .support import BAD, USAGE, fail, print_json, print_pairs, print_table, size, usage

if TYPE_CHECKING:
    from rapid_llm.perf.cases import Case
    from rapid_llm.perf.limits import Limits
    from rapid_llm.perf.offline import CaseResult
    from rapid_llm.perf.run import Outcome, Request


OFFLINE: Final = {"prefill": "512", "decode": 64, "batch": "1", "context": "512", "rounds": 10, "seconds": 60.0}
"""What is measured unless told otherwise."""


def run(
    *,
    shape: str | None,
    model: str | None,
    engine: Mapping[str, Any],
    offline: Mapping[str, Any],
    serving: Mapping[str, Any],
    serve: str | None,
    out: Path | None,
    force_busy: bool,
    seed: int,
    json: bool,
) -> None:
    """Measure an engine here, or a server; an option of the one is an error for the other. None: not given."""
    if shape is not None and model is not None:
        fail("give one of --shape and --model", USAGE)
    options, asked, load = ({k: v for k, v in given.items() if v is not None} for given in (engine, offline, serving))
    if serve is not None:
        from .bench_serve import run as run_serving

        _refuse(asked, "goes with a benchmark of an engine, not with --serve")
        run_serving(serve, shape, model, options, load, out=out, force_busy=force_busy, seed=seed, json=json)
        return
    _refuse(load, "is about a server; give --serve URL, or --serve local")
    run_engine(shape, model, options, {**OFFLINE, **asked}, out=out, force_busy=force_busy, seed=seed, json=json)


def _refuse(given: Mapping[str, Any], why: str) -> None:
    for name in given:
        fail(f"--{name.replace('_', '-')} {why}", USAGE)


def run_engine(
    shape: str | None,
    model: str | None,
    options: Mapping[str, Any],
    asked: Mapping[str, Any],
    *,
    out: Path | None,
    force_busy: bool,
    seed: int,
    json: bool,
) -> None:
    """Measure, print, write; status 1 if nothing was measured or a case became slower."""
    from rapid_llm.perf import earlier
    from rapid_llm.perf.run import Request

    compare: Path | None = asked.get("compare")
    if asked["decode"] < 0 or asked["rounds"] < 1:
        fail(f"--decode {asked['decode']}, --rounds {asked['rounds']}: steps are 0 or more, rounds 1 or more", USAGE)
    with usage():
        cases = _cases(asked)
        before = None if compare is None else earlier.load(compare)
    if not cases:
        fail("--prefill 0 and --decode 0 leave nothing to measure", USAGE)
    request = Request(
        _shape(shape),
        model,
        options,
        cases,
        rounds=asked["rounds"],
        max_seconds=asked["seconds"],
        seed=seed,
        peers=asked.get("peer", ()),
        profile=asked.get("profile", False),
        force_busy=force_busy,
        command=shlex.join(["rapid-llm", *sys.argv[1:]]),
    )
    outcome = _measure(request)
    found = _changes(outcome, before, compare)
    if json:
        print_json(outcome.record)
    else:
        show(outcome, found)
    write(out, outcome.record)
    if not outcome.measured or any(change["verdict"] == "SLOW" for change in found):
        raise typer.Exit(BAD)


def write(out: Path | None, record: Mapping[str, Any]) -> None:
    """The result file, if one is asked for; says so on standard error."""
    if out is not None:
        from rapid_llm.bench import write_json

        write_json(out, record)
        print(f"written to {out}", file=sys.stderr)


def _cases(asked: Mapping[str, Any]) -> Sequence[Case]:
    from rapid_llm.perf.cases import make_cases, numbers

    return make_cases(
        prefills=numbers("--prefill", asked["prefill"], none=True),
        batches=numbers("--batch", asked["batch"]),
        contexts=numbers("--context", asked["context"]),
        tokens=asked["decode"],
    )


def _shape(name: str | None) -> Any:
    """Checked before torch is imported, which takes a second."""
    if name is not None:
        from rapid_llm.models.shapes import shape_config

        shape_config(name)
    return name


def _measure(request: Request) -> Outcome:
    from rapid_llm.models.errors import ModelError
    from rapid_llm.perf.run import run_offline

    try:
        return run_offline(request, told=_tell)
    except ModelError:
        raise
    except (TypeError, ValueError) as error:
        fail(error, USAGE)


def _changes(outcome: Outcome, before: Mapping[str, Any] | None, path: Path | None) -> list[dict[str, Any]]:
    """The verdict on each case that an earlier run has too, kept in the record as well."""
    if before is None or path is None:
        return []
    from rapid_llm.perf import earlier

    with usage():
        earlier.check_comparable(outcome.record, before, path)
    found = [change.json() for change in earlier.changes(outcome.record, before)]
    if not found:
        fail(f"--compare {path}: the two runs have no case in common", USAGE)
    outcome.record["compared_with"] = {"file": str(path), "changes": found}
    return found


def _tell(result: CaseResult, limits: Limits) -> None:
    """A line of progress for each case that is done."""
    if result.failure:
        text = result.failure
    else:
        rates = [
            f"{name} {result.case.produced / arm.seconds.median:,.1f} tok/s over {len(arm.samples)} rounds"
            for name, arm in result.arms.items()
        ]
        text = ", ".join(rates)
    print(f"{result.case.title}: {text}", file=sys.stderr, flush=True)


def show(outcome: Outcome, changes: Sequence[Mapping[str, Any]]) -> None:
    """What was measured, on what, and what kept the rest from it."""
    from rapid_llm.perf import earlier

    record = outcome.record
    print_pairs(_about(record))
    print()
    print_table(
        (
            "case",
            "arm",
            "tok/s",
            "p10 to p90",
            "ms/step",
            "memory",
            "of measured",
            "of nominal",
            "of roofline",
            "notes",
        ),
        [row for case, result in zip(record["cases"], outcome.results, strict=True) for row in _rows(case, result)],
    )
    for case, result in zip(record["cases"], outcome.results, strict=True):
        for line in _remarks(case, result, record["engine"]["graphs"]):
            print(line)
    for change in changes:
        print(earlier.Change(**change))
    if record["profile"] is not None:
        _show_profile(record["profile"])


def _about(record: Mapping[str, Any]) -> list[tuple[str, object]]:
    model, machine, limits = record["model"], record["machine"], record["limits"]
    weights = model["read_bytes"]
    nominal = limits["nominal"]
    memory, products = limits["bytes_per_second"], limits["flops_per_second"]
    maker = (
        "" if nominal["bytes_per_second"] is None else f"; {nominal['source']} {size(nominal['bytes_per_second'])}/s"
    )
    device = machine["gpus"][0]["name"] if model["device"] == "cuda" else machine["cpu"]["model"]
    kind = "random weights" if model["random_weights"] else "weights of a file"
    pairs: list[tuple[str, object]] = [
        ("model", f"{model['name']}, {model['parameters'] / 1e6:,.1f} M parameters, {kind}, {model['dtype']}"),
        ("device", _where(device, model, machine)),
        (
            "a step reads",
            f"{size(weights['weights'])} of weights, {size(model['kv_bytes_per_token'])} a token of context",
        ),
        ("memory", f"{size(memory['measured'])}/s measured ({memory['by']}){maker}"),
        ("products", f"{products['measured'] / 1e12:.2f} TFLOP/s measured ({products['by']})"),
    ]
    if weights["experts"]:
        pairs.insert(3, ("experts", f"{size(weights['experts'])}, of which a step reads those that are chosen"))
    if record["disturbed"] or record["force_busy"]:
        others = record["load"]["during"]["others"]
        pairs.append(("DISTURBED", f"other programs used {others} CPUs meanwhile: quote none of these figures"))
    return pairs


def _where(device: str, model: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    many = "" if model["ranks"] == 1 else f"{model['ranks']} x "
    threads = f", {machine['threads']} thread{'s'[: machine['threads'] != 1]}" if model["device"] == "cpu" else ""
    return f"{many}{device}{threads}" + ("; bytes and limits are of one" if many else "")


def _rows(case: Mapping[str, Any], result: CaseResult) -> list[tuple[str, ...]]:
    title = result.case.title
    if result.failure:
        return [(title, "", "", "", "", "", "", "", "", f"{result.code}: {result.failure}")]
    rows: list[tuple[str, ...]] = []
    for name, arm in case["arms"].items():
        rates, step = arm["tokens_per_second"], arm["seconds_a_step"]["median"]
        notes = [f"bound by {arm['bound']}", *arm["flags"]]
        ratio = case["faster_than"].get(name)
        if ratio is not None:
            notes.append(f"ours {ratio['median']:.2f} x ({ratio['low']:.2f} to {ratio['high']:.2f})")
        rows.append(
            (
                title,
                name,
                f"{rates['median']:,.1f}",
                f"{rates['p10']:,.1f} to {rates['p90']:,.1f}",
                f"{step * 1e3:.3f}",
                f"{size(arm['bytes_per_second'])}/s",
                _percent(arm["share_of_bandwidth"]),
                _percent(arm["share_of_nominal_bandwidth"]),
                _percent(arm["share_of_roofline"]),
                ", ".join(notes),
            )
        )
    return rows


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _remarks(case: Mapping[str, Any], result: CaseResult, engine: Mapping[str, Any] | None) -> list[str]:
    """Arms that are missing, and how the steps ran. engine: what is known of its graphs."""
    lines = [f"{result.case.title}: no figures of {name}: {reason}" for name, reason in result.missing.items()]
    graphs = case.get("graphs")
    if graphs is not None and result.case.kind == "decode":
        captured = engine is not None and engine["captured"]
        steps = [f"{graphs['graph_steps']} steps {'by CUDA graph' if captured else 'of fixed size, without graphs'}"]
        steps += [f"{count} call by call ({reason})" for reason, count in graphs["eager_steps"].items()]
        lines.append(f"{result.case.title}: {', '.join(steps)}")
        lines += [f"no graph for a batch of {size}: {reason}" for size, reason in graphs["refused"].items()]
    return lines


def _show_profile(profile: Mapping[str, Any]) -> None:
    print(f"\nop by op, without graphs: {', '.join(profile['cases'])}")
    print_table(
        ("phase", "op", "row", "calls", "share", "GB/s", "of measured"),
        [
            (
                line["phase"],
                line["op"],
                line["row"],
                str(line["calls"]),
                f"{line['share']:.1%}",
                f"{line['gb_per_s']:.1f}" if line["row"] else "",
                _percent(line["bandwidth_share"]) if line["row"] else "",
            )
            for line in profile["ops"]
        ],
    )
