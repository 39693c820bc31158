"""`rapid-llm bench --serve`: a server's latency and goodput under load, as a table for people and as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import typer

from .support import BAD, USAGE, fail, print_json, print_pairs, print_table, usage

LOCAL: Final = "local"
DEFAULTS: Final = {"rate": "1", "requests": 100, "prompt_tokens": 512, "output_tokens": 128}


def run(
    serve: str,
    shape: str | None,
    model: str | None,
    options: Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    out: Path | None,
    force_busy: bool,
    seed: int,
    json: bool,
) -> None:
    """Put load on the server at `serve`, or on one of `shape` or `model` that is started here; status 1 if a request
    failed."""
    from rapid_llm.perf.http import Endpoint, HttpError
    from rapid_llm.perf.traffic import Traffic

    asked = {**DEFAULTS, **given}
    key, rates = asked.pop("api_key", None), asked.pop("rate")
    with usage():
        runs = [Traffic(rate=rate, seed=seed, **asked) for rate in _rates(rates)]
        if serve != LOCAL:
            Endpoint.of(serve, key)
    _refuse(serve, shape, options)
    try:
        record = _measure(serve, shape, model, options, runs, key, force_busy)
    except (HttpError, OSError) as error:
        fail(f"the server {'started here' if serve == LOCAL else serve}: {error}", BAD)
    if json:
        print_json(record)
    else:
        show(record)
    from .bench import write

    write(out, record)
    if any(found["errors"] for found in record["runs"]):
        raise typer.Exit(BAD)


def _rates(text: str) -> list[float]:
    found = []
    for part in text.split(","):
        try:
            found.append(float(part))
        except ValueError:
            raise ValueError(f"--rate {text!r}: {part.strip()!r} is no number; use 1,4,16 or inf") from None
        if math.isnan(found[-1]):
            raise ValueError(f"--rate {text!r}: {part.strip()!r} is no number; use 1,4,16 or inf")
    return list(dict.fromkeys(found))


def _refuse(serve: str, shape: str | None, options: Mapping[str, Any]) -> None:
    if serve == LOCAL:
        if shape is not None:
            from rapid_llm.models.shapes import shape_config

            shape_config(shape)
        return
    for name in (*(["shape"] if shape is not None else []), *options):
        fail(f"--{name.replace('_', '-')}: the server at {serve} runs as it was started; leave it out", USAGE)


def _measure(
    serve: str,
    shape: str | None,
    model: str | None,
    options: Mapping[str, Any],
    runs: Sequence[Any],
    key: str | None,
    force_busy: bool,
) -> dict[str, Any]:
    """The machine is looked at before the server is started and after it has ended, so that only others count."""
    from rapid_llm.bench import Run
    from rapid_llm.perf import serving
    from rapid_llm.perf.http import Endpoint

    local = serve == LOCAL
    watch = Run(
        "serving",
        command=shlex.join(["rapid-llm", *_without_key(sys.argv[1:])]),
        force_busy=force_busy,
        threads_checked=False,
    )
    held = _held_to(shape, options, force_busy) if local and shape is not None else None
    with _server(shape, model, options) if local else contextlib.nullcontext(serve) as url:
        endpoint = Endpoint.of(url, key)
        name = None if local else model
        found = asyncio.run(serving.load(endpoint, name, runs, told=_tell, patience=60.0 if local else 0.0))
    record = watch.record()
    del record["figures"]  # `runs` has them
    if not local:
        record["disturbed"] = None  # the server itself may be among the programs that were seen
    first = runs[0]
    if held is not None:
        from rapid_llm.perf.capacity import share

        for one in found["runs"]:
            one["share_of_roofline"] = share(*held, one, first.prompt_tokens, first.output_tokens)
    return {
        **record,
        "perf_kind": serving.KIND,
        "perf_schema": serving.SCHEMA,
        "limits": None if held is None else held[1].json(),
        "server": {"address": LOCAL if local else serve, "shape": shape, "options": dict(options) if local else None},
        "traffic": {
            **{name: getattr(first, name) for name in ("requests", "prompt_tokens", "output_tokens", "seed")},
            "arrivals": "Poisson, planned; time counts from when a request was due",
        },
        **found,
    }


def _held_to(shape: str, options: Mapping[str, Any], force_busy: bool) -> tuple[Any, Any]:
    """What a shape's steps need, and what this device gives while no server is here yet."""
    from rapid_llm.bench import device_for
    from rapid_llm.engine.loading import resolve_device
    from rapid_llm.engine.options import EngineOptions
    from rapid_llm.models.shapes import shape_config
    from rapid_llm.perf.busy import require_idle_device
    from rapid_llm.perf.capacity import needs_of_shape
    from rapid_llm.perf.limits import dtypes_of_products, measure_limits

    checked = EngineOptions.of(dict(options))
    where = resolve_device(checked.device)
    harness = device_for(str(where))
    require_idle_device(harness, force=force_busy)
    needs = needs_of_shape(shape_config(shape), checked, where)
    limits = measure_limits(harness, where, dtypes_of_products(checked.dtype, where))
    if where.type == "cuda":
        import torch

        torch.cuda.empty_cache()  # the server needs the memory
    return needs, limits


def _without_key(words: Sequence[str]) -> list[str]:
    """A command line for a file that others read."""
    found = list(words)
    for index, word in enumerate(found):
        if word == "--api-key" and index + 1 < len(found):
            found[index + 1] = "..."
        elif word.startswith("--api-key="):
            found[index] = "--api-key=..."
    return found


@contextlib.contextmanager
def _server(shape: str | None, model: str | None, options: Mapping[str, Any]) -> Iterator[str]:
    from rapid_llm.perf.local_server import command, running

    print("starting a server", file=sys.stderr, flush=True)
    with running(command(shape, model, options)) as url:
        yield url


def _tell(found: Mapping[str, Any]) -> None:
    text = f"{found['output_tokens_per_second']:,.1f} tok/s, {found['completed']} of {found['requests']} requests"
    print(f"rate {found['rate']}: {text}", file=sys.stderr, flush=True)


def show(record: Mapping[str, Any]) -> None:
    """One line a rate, and what went wrong."""
    traffic = record["traffic"]
    pairs: list[tuple[str, object]] = [
        ("server", f"{record['server']['address']}, model {record['model']}"),
        (
            "requests",
            f"{traffic['requests']} at each rate, of {traffic['prompt_tokens']} + {traffic['output_tokens']} tokens",
        ),
    ]
    if not record["ignore_eos"]:
        pairs.append(("answers", "may be shorter: the server does not go on past the model's end token"))
    if record["disturbed"] or record["force_busy"]:
        pairs.append(("DISTURBED", f"other programs used {record['load']['during']['others']} CPUs: quote nothing"))
    print_pairs(pairs)
    print()
    headings = (
        "req/s asked",
        "req/s",
        "tok/s",
        "of roofline",
        "in flight",
        "TTFT p50",
        "p90",
        "p99 ms",
        "ITL p50",
        "p90",
        "p99 ms",
    )
    print_table((*headings, "goodput req/s", "notes"), [_row(found) for found in record["runs"]])
    for found in record["runs"]:
        for error, count in found["errors"].items():
            print(f"rate {found['rate']}: {count} of {found['requests']} requests failed: {error}")


def _row(found: Mapping[str, Any]) -> tuple[str, ...]:
    slo = found["slo"]
    asked = any(value is not None for value in slo.values())
    goodput = f"{found['goodput_requests_per_second']:.2f} ({found['share_within_slo']:.0%})" if asked else ""
    return (
        str(found["rate"]),
        f"{found['requests_per_second']:.2f}",
        f"{found['output_tokens_per_second']:,.1f}",
        "" if "share_of_roofline" not in found else f"{found['share_of_roofline']:.1%}",
        f"{found['concurrency']:.1f}",
        *_milliseconds(found["ttft_seconds"]),
        *_milliseconds(found["itl_seconds"]),
        goodput,
        ", ".join(found["flags"]),
    )


def _milliseconds(found: Mapping[str, float] | None) -> tuple[str, ...]:
    return ("", "", "") if found is None else tuple(f"{found[name] * 1e3:.1f}" for name in ("p50", "p90", "p99"))
