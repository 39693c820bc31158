"""`rapid-llm kernels`: the table of rows, and why one of them runs. Imports no torch by itself; a row's probe may."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import typer

from .support import BAD, USAGE, as_options, fail, print_json, print_table

_DEVICE = re.compile(r"(cpu|cuda(:\d+)?)")


def list_rows(*, op: str | None, device: str | None, json: bool) -> None:
    """Print `registry.listing`, of one op or of all."""
    import rapid_llm.kernels  # noqa: F401 - declares the ops
    from rapid_llm.kernels.registry import get_op, listing, plugins

    _check_device(device)
    if op is not None:
        plugins.scan()
        get_op(op)  # raises for an op that doesn't exist, with the nearest name
    rows: list[dict[str, Any]] = [row for row in listing(device) if op is None or row["op"] == op]
    if json:
        print_json(rows)
        return
    print_table(("row", "runs here", "rank", "evidence", "why not, and what would admit it"), map(_cells, rows))


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    evidence = row["evidence"]
    return (
        row["name"],
        "yes" if row["admitted"] else "no",
        "" if evidence is None else "unmeasured" if row["priority"] is None else row["priority"],
        evidence["state"] if evidence is not None else "",
        "; ".join(f"{_last_line(r['text'])} ({_by_variable(row, r['fix'])})" for r in row["reasons"]),
    )


def _by_variable(row: dict[str, Any], fix: str) -> str:
    """A fix that names a row, by the variable that does so for every command."""
    from rapid_llm.settings import op_variable

    return fix.replace(f"backend={row['name']!r}", f"{op_variable(row['op'])}={row['name']}") if row["op"] else fix


def _last_line(text: str) -> str:
    """Of a traceback, the line that says what happened; other texts are one line anyway."""
    return text.strip().splitlines()[-1] if text.strip() else ""


def explain_op(
    op: str,
    *,
    device: str | None,
    dtype: str | None,
    scheme: str | None,
    dims: Sequence[str],
    allow: Sequence[str],
    prepack: bool,
    backend: str | None,
    json: bool,
) -> None:
    """Print `registry.explain` for a call stated by its facts; status 1 if no row can run it."""
    from rapid_llm.kernels import explain

    _check_device(device)
    found = explain(
        op,
        device=device,
        dtype=dtype,
        scheme=scheme,
        dims=dict(map(parse_dim, dims)),
        allow=tuple(allow),
        prepack=prepack,
        backend=backend,
    )
    if json:
        print_json(found.json())
    else:
        print(as_options(str(found)))
    if found.selected is None:
        raise typer.Exit(BAD)


def _check_device(device: str | None) -> None:
    if device is not None and _DEVICE.fullmatch(device) is None:
        fail(f"--device {device}: use cpu, cuda or cuda:N", USAGE)


def parse_dim(text: str) -> tuple[str, int]:
    """`NAME=VALUE`; anything else ends the command."""
    name, equals, value = text.partition("=")
    if not (name and equals and value.isascii() and value.isdigit()):
        fail(f"--dim {text}: use NAME=VALUE with a whole number, such as tokens=1", USAGE)
    return name, int(value)
