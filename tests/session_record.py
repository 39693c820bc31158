"""A pytest plugin that writes one JSON file a session: where it ran, and what each test found.

Tests add figures with pytest's own `record_property`; `make test-gpu` keeps the file under `benchmarks/results/`.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


class SessionRecord:
    """Collects one entry a test: outcome, seconds, properties, and the reason of a skip or the text of a failure."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = self.tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        entry["seconds"] = round(entry["seconds"] + report.duration, 4)
        if report.outcome != "passed":
            entry["outcome"] = report.outcome if report.when == "call" or report.skipped else "error"
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            entry["reason"] = text[-2000:]
        if report.when == "teardown" and report.user_properties:
            entry["properties"] = dict(report.user_properties)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if not self.tests:  # nothing ran: an older file is worth more
            return
        from rapid_llm.bench import machine_record, machine_slug, write_json

        path = self.path.with_name(self.path.name.replace("{machine}", machine_slug()))
        write_json(
            path,
            {
                "name": path.stem,
                "command": _command(sys.argv[1:]),
                "machine": machine_record(),
                "exit_status": int(exitstatus),
                "outcomes": dict(Counter(test["outcome"] for test in self.tests.values())),
                "tests": self.tests,
            },
        )


def _command(arguments: list[str]) -> str:
    """The command without this machine's paths: the result file's name is left out."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith("--result-file"):
            kept.append(argument)
        skip = argument == "--result-file"
    return " ".join(["python -m pytest", *kept])
