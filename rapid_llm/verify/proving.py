"""One task of a verification run: a row in one dtype and scheme over every case, or the wrong rows over a row's cases.

Both are functions of names alone, so that any process can do them, and neither raises: what goes wrong is in the
outcome.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import plugins
from rapid_llm.verify import setting
from rapid_llm.verify.conformance import check_callable, check_row
from rapid_llm.verify.mutants import Score, score
from rapid_llm.verify.pool import Done

SHOWN: Final = 5
"""Failures that an outcome keeps."""

_threads = [0]


@dataclass(frozen=True, slots=True)
class Task:
    """kind: `row`, or `mutants` for the wrong rows of its op over the cases that it takes. dtypes of `mutants`: all."""

    kind: str
    op: str
    row: str
    device: str
    dtype: str = ""
    scheme: str | None = None
    budget: str = "full"

    def __str__(self) -> str:
        if self.kind == "mutants":
            return f"wrong rows of {self.op}, by the cases of {self.row}"
        return " ".join(filter(None, (self.row, self.dtype, self.scheme)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: `ok`, `failed` (wrong, or died) or `nothing` (nothing was compared). The rest is the report's."""

    task: Task
    status: str
    text: str
    seconds: float
    cases: int = 0
    skipped: int = 0
    refused: int = 0
    calls: int = 0
    elements: int = 0
    seeds: int = 0
    worst_ulp: float = 0.0
    worst_ratio: float = 0.0
    worst_norm: float = 0.0
    interpreted: bool = False
    failures: tuple[str, ...] = ()
    score: Score = field(default_factory=Score)


def start(lock: str) -> None:
    """Make a worker ready: one compute thread, other packages' rows, and one user at a time of vast tensors."""
    torch.set_num_threads(1)
    logging.getLogger("rapid_llm").setLevel(logging.ERROR)  # rows speak of odd inputs, of which these are full
    _threads[0] = 2
    setting.share(lock)
    plugins.scan()


def work(task: Task) -> Done:
    """Do a task; a device that is unusable afterwards ends the worker."""
    outcome = attempt(task)
    return Done(outcome, last=outcome.status == "failed" and not _usable(task.device))


def attempt(task: Task) -> Outcome:
    """Do a task in this process."""
    started = time.perf_counter()
    try:
        outcome = _mutants(task) if task.kind == "mutants" else _row(task)
    except Exception as error:  # of a row or a case, whose author must see it
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        outcome = Outcome(task, "failed", text, 0.0)
    return replace(outcome, seconds=time.perf_counter() - started)


def _row(task: Task) -> Outcome:
    report = check_row(
        task.op,
        task.row,
        device=task.device,
        dtype=task.dtype,
        scheme=task.scheme,
        budget=task.budget,
        compile_threads=_threads[0] or None,
    )
    status = "ok" if report.ok else "failed" if report.failures else "nothing"
    text = str(report.failures[0]) if report.failures else "" if report.ok else "nothing was compared"
    return Outcome(
        task,
        status,
        text,
        report.seconds,
        cases=report.cases,
        skipped=report.skipped,
        refused=report.refused,
        calls=report.calls,
        elements=report.elements,
        seeds=len(report.seeds),
        worst_ulp=report.worst_ulp,
        worst_ratio=report.worst_ratio,
        worst_norm=report.worst_norm,
        interpreted=report.device != task.device,
        failures=tuple(str(f) for f in report.failures[:SHOWN]),
    )


def _mutants(task: Task) -> Outcome:
    found = score(registry.get_op(task.op), registry.get_row(task.row), budget=task.budget, check=check_callable)
    text = f"not refused: {', '.join(found.alive)}" if found.alive else ""
    status = "ok" if found.enough else "failed" if found.critical_alive else "nothing"
    return Outcome(task, status, text, 0.0, score=found)


def _usable(device: str) -> bool:
    """Whether the device still answers; an illegal access makes every later call of a process fail."""
    if not device.startswith("cuda"):
        return True
    with contextlib.suppress(Exception):
        torch.cuda.synchronize(device)
        return bool((torch.ones(2, device=device) + 1 == 2).all())
    return False
