"""Writes the pages that follow from the declarations: `make docs`, or `python docs/generate.py`.

`--check` writes nothing and exits with 1 if a page is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rapid_llm import settings
from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import KernelSpec, OpSpec, timing_records
from rapid_llm.kernels.registry.records import SHIPPED
from rapid_llm.kernels.registry.schema import REQUIRED
from rapid_llm.kernels.registry.timings import MARGIN, Point

DOCS = Path(__file__).resolve().parent


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the generated pages of docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    options = parser.parse_args(arguments)
    stale = []
    for name, text in pages().items():
        path = DOCS / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not options.check:
            path.write_text(text)
            print(f"wrote docs/{name}")
    if options.check and stale:
        print(f"out of date: {', '.join(stale)}; run 'make docs'", file=sys.stderr)
        return 1
    return 0


def pages() -> dict[str, str]:
    """File name -> text of every generated page."""
    return {"ops.md": ops_page(), "environment.md": environment_page(), "ranks.md": ranks_page()}


def ops_page() -> str:
    ops = sorted((op for op in registry.ops() if _is_ours(op)), key=lambda op: (op.group, op.id))
    lines = [
        "# Ops and rows",
        "",
        "Generated from the declarations by `make docs`; edit those instead.",
        "",
        "| op | function | group | rows |",
        "|---|---|---|---|",
    ]
    for op in ops:
        rows = ", ".join(f"`{row.name}`" for row in registry.rows(op.id))
        lines.append(f"| [{op.id}](#{_anchor(op.id)}) | `{op.function}` | {op.group} | {rows} |")
    for op in ops:
        lines += ["", *_op_section(op)]
    return "\n".join(lines) + "\n"


def _op_section(op: OpSpec) -> list[str]:
    lines = [f"## {op.id}", "", "```python", f"{op.function}({signature(op)})", "```", ""]
    for paragraph in op.doc.strip().split("\n\n"):
        lines += [" ".join(paragraph.split()).replace("<", "&lt;").replace("*", "\\*"), ""]
    lines.append(f"- dtypes of `{op.dtype_of}`: {', '.join(op.dtypes)}")
    if op.schemes:
        lines.append(f"- schemes: {', '.join(op.schemes)}")
    if op.dims:
        lines.append(f"- dimensions: {', '.join(f'{name} = `{code}`' for name, code in op.dims.items())}")
    if op.parsed.mutated:
        lines.append(f"- writes to: {', '.join(op.parsed.mutated)}")
    if op.numerics.roundings:
        lines.append(f"- roundings that a caller can allow: {', '.join(op.numerics.roundings)}")
    lines += ["", "| row | runs on | dtypes | needs | remarks |", "|---|---|---|---|---|"]
    lines += [_row_line(op, row) for row in registry.rows(op.id)]
    return lines


def signature(op: OpSpec) -> str:
    """The public function's parameters."""
    parts, starred = [], False
    for name, kind, default in op.parsed.parameters():
        if kind == "kw" and not starred:
            parts.append("*")
            starred = True
        parts.append(name if default is REQUIRED else f"{name}={default!r}")
    return ", ".join(parts)


def _row_line(op: OpSpec, row: KernelSpec) -> str:
    devices = ", ".join(row.devices) or "any device"
    if row.capability:
        devices += " " + " or ".join(f"SM {low}{'+' if high is None else f'-{high}'}" for low, high in row.capability)
    needs = [*map(str, row.shape.require), *row.layout]
    if row.schemes and row.schemes != op.schemes:
        needs.append(f"scheme {' or '.join(row.schemes)}")
    remarks = []
    if row.shape.prefer:
        remarks.append(f"prefers {', '.join(map(str, row.shape.prefer))}")
    if row.roundings:
        remarks.append(f"rounds {', '.join(row.roundings)}")
    if row.prepack:
        remarks.append("packs the weight")
    if not row.graph_safe:
        remarks.append("not in CUDA graphs")
    if row.is_native:
        remarks.append("the floor")
    cells = (f"`{row.name}`", devices, ", ".join(row.dtypes or op.dtypes), "; ".join(needs), "; ".join(remarks))
    return "| " + " | ".join(cells) + " |"


def environment_page() -> str:
    lines = [
        "# Environment variables",
        "",
        "Generated from `rapid_llm/settings.py` by `make docs`. `rapid-llm doctor --env` shows what is set here.",
        "",
        "| variable | takes | unset means | what it does |",
        "|---|---|---|---|",
    ]
    for s in settings.TABLE:
        lines.append(f"| `{s.name}` | {s.takes} | {s.default} | {s.doc} |")
    return "\n".join(lines) + "\n"


def ranks_page(folder: Path | None = None) -> str:
    """What was measured, which row that ranks first, and by how much another was faster; from the records in `folder`,
    by default those that ship."""
    lines = [
        "# Measured ranks",
        "",
        "Generated by `make docs` from the times in `rapid_llm/kernels/records/timings/`, which",
        f"`rapid-llm kernels bench` makes. Rows that differ by less than {100 * MARGIN:.0f} %, or by less than the",
        "noise of the run, are near ties, and the row that was chosen before stays. Regret is by how much it is slower",
        "than the fastest one. See",
        "[dispatch.md](dispatch.md#measured-ranks).",
    ]
    files = sorted((timing_records.folder(SHIPPED) if folder is None else folder).glob("*.json"))
    if not files:
        lines += [
            "",
            "No times ship yet: rows rank by preference and priority, and by what is measured on a machine itself.",
        ]
    for path in files:
        kind = json.loads(path.read_text())["device"]
        lines += ["", *_ranks_of(kind, timing_records.load(path, kind).points)]
    return "\n".join(lines) + "\n"


def _ranks_of(kind: str, points: tuple[Point, ...]) -> list[str]:
    ranked = [p for p in points if p.order]
    worst = max((p.regret(p.order[0]) for p in ranked), default=0.0)
    dates = sorted({p.date for p in points})
    lines = [
        f"## {kind}",
        "",
        f"{len(ranked)} calls, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, with torch "
        f"{', '.join(sorted({p.torch for p in points}))}; {len(points) - len(ranked)} more take as long as a launch "
        f"and rank nothing. The largest regret is {worst:.1%}.",
        "",
        "| op | dtype | call | dispatch runs | us | fastest | us | regret | rows |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for p in sorted(ranked, key=lambda p: (p.op, p.dtype, p.scheme or "", sorted(p.dims.items()))):
        first, fastest = p.order[0], min(p.order, key=lambda name: p.rows[name].ratio)
        call = ", ".join([*([p.scheme] if p.scheme else []), *(f"{n}={size}" for n, size in sorted(p.dims.items()))])
        times = [f"`{first}`", f"{p.rows[first].us:.4g}", f"`{fastest}`", f"{p.rows[fastest].us:.4g}"]
        cells = [p.op, p.dtype, call, *times, f"{p.regret(first):.1%}", str(len(p.order))]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _is_ours(op: OpSpec) -> bool:
    """Declared by this package, and not by a plugin of this installation."""
    return registry.rows(op.id)[0].target.startswith("rapid_llm.")


def _anchor(op_id: str) -> str:
    return op_id.replace(".", "")


if __name__ == "__main__":
    import rapid_llm.kernels.ops  # noqa: F401 - declares the ops

    sys.exit(main())
