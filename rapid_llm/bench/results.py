"""Result files: figures with their targets, and everything a reader needs to judge them, as JSON under
`benchmarks/results/`."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .load import BUSY_LIMIT, PATIENCE_S, LoadWatch, require_idle
from .machine import machine_record, machine_slug
from .threads import require_normal_threads

RESULTS = Path("benchmarks/results")
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. `at_most` or `at_least` is its target, if it has one; `detail` holds samples, rows, sizes."""

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"figure {self.name!r}: {self.value} is no measurement")

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.at_most is None and self.at_least is None:
            return None
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )

    def json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"name": self.name, "value": self.value, "unit": self.unit, "met": self.met}
        targets = {"at_most": self.at_most, "at_least": self.at_least}
        record |= {key: value for key, value in targets.items() if value is not None}
        if self.detail:
            record["detail"] = dict(self.detail)
        return record


class Run:
    """One run of a benchmark: refuses a busy machine at the start, collects figures, knows the load until its end.

    name: of the result file. command: how to repeat it. force_busy: measure on a busy machine, and let the record say
    so. patience: seconds to wait for a quiet one. Raises `MachineBusyError` or `SlowThreadsError` at construction.
    """

    def __init__(
        self,
        name: str,
        *,
        command: str = "",
        force_busy: bool = False,
        patience: float = PATIENCE_S,
        threads_checked: bool = True,
    ) -> None:
        self.name = name
        self.command = command
        self.force_busy = force_busy
        self.figures: list[Figure] = []
        self.extra: dict[str, Any] = {}
        self.before = require_idle(force=force_busy, patience=patience)
        self.threaded_op_ms = require_normal_threads() if threads_checked else None
        self._watch = LoadWatch()

    def add(self, figure: Figure) -> Figure:
        self.figures.append(figure)
        return figure

    def record(self) -> dict[str, Any]:
        """The whole result; `disturbed` is true if others took more than the permitted share while it ran."""
        during = self._watch.stop()
        return {
            "schema": SCHEMA,
            "name": self.name,
            "command": self.command,
            "machine": machine_record(),
            "load": {"before": self.before.json(), "during": during.json(), "limit": BUSY_LIMIT},
            "disturbed": None if during.others is None else during.others > BUSY_LIMIT,
            "force_busy": self.force_busy,
            "threaded_op_ms": None if self.threaded_op_ms is None else self.threaded_op_ms.json(),
            "figures": [figure.json() for figure in self.figures],
            **self.extra,
        }

    @property
    def missed(self) -> list[Figure]:
        """Figures that miss their target."""
        return [figure for figure in self.figures if figure.met is False]


def result_path(name: str, folder: Path = RESULTS) -> Path:
    """`<folder>/<name>-<machine>.json`."""
    return folder / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', name)}-{machine_slug()}.json"


def write_json(path: Path, record: Mapping[str, Any]) -> Path:
    """Write `record` whole or not at all; raises `ValueError` on NaN and infinities, which JSON does not have."""
    text = json.dumps(record, indent=1, allow_nan=False, default=_plain) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _plain(value: object) -> object:
    """Numbers of numpy and torch scalars, and the text of paths."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    item = getattr(value, "item", None)
    if callable(item):
        return item()
    raise TypeError(f"{type(value).__name__} {value!r} has no JSON form")
