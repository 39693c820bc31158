"""Calls that went wrong, as files that can be made again: saved with their arguments' values and strides."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import probes
from rapid_llm.verify.cases.build import Case
from rapid_llm.verify.conformance import check_callable
from rapid_llm.verify.guard import span, unique_view
from rapid_llm.verify.report import Report
from rapid_llm.verify.runner import Run

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Saved:
    """One call: of which row, in what dtype and scheme, where it went wrong and how, and its arguments by name."""

    row: str
    device: str
    dtype: str
    scheme: str | None
    case: str
    failure: str
    args: dict[str, Any]


def first_use(row_name: str, device: str, dtype: str, scheme: str | None, folder: Path) -> str:
    """Try the small set of cases on a row; what is wrong, with the file that replays it, or ""."""
    row = registry.get_row(row_name)
    op = registry.get_op(row.op)
    with _disable_current_modes():  # a caller may be tracing with tensors that hold no numbers
        report = check_callable(
            op,
            registry.load_target(row_name),
            device=device,
            dtype=dtype,
            scheme=scheme,
            budget="interpret",
            row=row,
            first_failure=True,
        )
        if not report.failures:
            return ""
        return f"{report.failures[0]}{_kept(report, row_name, device, folder)}"


def _kept(report: Report, row_name: str, device: str, folder: Path) -> str:
    """Save the report's first failure; how to replay it, or why that cannot be."""
    what = "-".join(filter(None, (row_name, report.dtype, report.scheme)))
    path = folder / (re.sub(r"[^A-Za-z0-9_.]+", "-", what) + ".pt")
    try:
        save(report, row_name, device, path)
    except OSError as error:
        return f" (the call could not be saved: {error})"
    return f"; replay it: rapid-llm kernels verify --replay {path}"


def save(report: Report, row_name: str, device: str, path: Path) -> None:
    """Write the call of a report's first failure to `path`."""
    failure = report.failures[0]
    op = registry.get_op(report.op)
    cases = probes.load(op.cases)(report.dtype, device, report.scheme, budget=report.budget)
    case = next(c for c in cases if c.id == failure.case)
    args = case.make(torch.Generator().manual_seed(failure.seed * 7919 + 17))
    data = {
        "format": FORMAT,
        "row": row_name,
        "device": device,
        "dtype": report.dtype,
        "scheme": report.scheme,
        "case": case.id,
        "failure": str(failure),
        "args": {k: _put(v, "cpu") if isinstance(v, Tensor) else v for k, v in args.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(data, path)


def _put(values: Tensor, device: str) -> Tensor:
    """A copy on `device` with the same strides; elements that share memory share it again."""
    view = torch.zeros(span(values), dtype=values.dtype, device=device).as_strided(values.shape, values.stride())
    unique_view(view).copy_(unique_view(values))
    return view


def load(path: Path) -> Saved:
    """Read a saved call; raises `ValueError` for a file that is none. Nothing in the file is executed."""
    try:
        data = torch.load(path, weights_only=True)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, expected {FORMAT}")
        fields = {name: data[name] for name in ("row", "device", "dtype", "scheme", "case", "failure", "args")}
    except OSError:
        raise
    except Exception as error:  # torch raises what it likes for a file that is not its own
        raise ValueError(f"{path}: not a saved call: {type(error).__name__}: {error}") from None
    return Saved(**fields)


def replay(saved: Saved, device: str | None = None) -> Report:
    """Make the call again, with every check of the suite."""
    row = registry.get_row(saved.row)
    op = registry.get_op(row.op)
    where = device or saved.device
    report = Report(op.id, row.name, where, saved.dtype, saved.scheme, "full", (0,))

    def make(g: torch.Generator) -> dict[str, Any]:
        del g
        return {k: _put(v, where) if isinstance(v, Tensor) else v for k, v in saved.args.items()}

    run = Run(op, registry.load_target(row.name), row, torch.device(where), saved.scheme, report)
    run.case(Case(saved.case, make), (0,))
    return report
