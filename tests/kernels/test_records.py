"""The records that ship are of the code that ships: otherwise every user runs the floor.

A red test here after an edit of a kernel asks for `make records`; GPUs' records are made on the GPU:
`rapid-llm kernels verify --device cuda --write shipped`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rapid_llm.kernels.ops  # noqa: F401  (registers the rows)
from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import KernelSpec, evidence, records

FILES = sorted(records.folder(records.SHIPPED).glob("cpu-*.json"))
SOMETIMES = ("rapid_llm.kernels.cpp:available_bf16", "rapid_llm.kernels.ops.gemm.linear_rowwise:available_bf16")
"""Probes of rows that some classes of CPU lack."""


def _rows() -> list[KernelSpec]:
    every = [row for op in registry.ops() for row in registry.rows(op.id)]
    return [r for r in every if registry.registry.is_shipped(r.name) and (not r.devices or "cpu" in r.devices)]


def test_the_usual_cpus_have_records() -> None:
    """Catches: a class of CPUs that would run the floor out of the box."""
    assert {json.loads(path.read_text())["device"] for path in FILES} >= {"cpu avx2", "cpu avx512", "cpu avx512_bf16"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_row_for_cpus_has_a_fresh_record(path: Path) -> None:
    """Catches: a kernel that was edited, or added, and whose proof was not made again (`make records`)."""
    table = records.table(records.SHIPPED, json.loads(path.read_text())["device"])
    stale = [row.name for row in _rows() if row.name in table and evidence._compare(row, table[row.name])]
    missing = [row.name for row in _rows() if row.name not in table and row.available not in SOMETIMES]
    assert not stale, f"make records: their source has changed: {', '.join(stale)}"
    assert not missing, f"make records: no record of {', '.join(missing)}"


def test_records_of_gpus_are_read() -> None:
    """Catches: a shipped file of a GPU's records whose rows are all stale, which nobody would notice here."""
    for path in records.folder(records.SHIPPED).glob("cuda-*.json"):
        table = records.table(records.SHIPPED, json.loads(path.read_text())["device"])
        fresh = [name for name, kept in table.items() if not evidence._compare(registry.get_row(name), kept)]
        assert fresh, f"{path.name}: no record is of the present source"
