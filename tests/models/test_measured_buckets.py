"""Ranges of token counts follow what was measured."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from rapid_llm.kernels.registry import get_row, records, timing_records
from rapid_llm.kernels.registry.records import USER
from rapid_llm.kernels.registry.timings import Point, Timing
from rapid_llm.models.op_table import buckets

CPU = torch.device("cpu")
ROW = "native/rmsnorm"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No records but the test's own."""
    monkeypatch.setattr(records, "folder", lambda layer: tmp_path / layer)
    monkeypatch.setattr(timing_records, "device_class", lambda device, index=None: f"{device} test")
    timing_records.forget()


def measured(tokens: int) -> None:
    source = timing_records.source_of(get_row(ROW))
    assert source is not None
    point = Point("rmsnorm", "fp32", None, {"tokens": tokens, "hidden": 64}, {ROW: Timing(1.0, 1.0, 1.0)})
    timing_records.write(timing_records.path_of(USER, "cpu test"), "cpu test", [point], {ROW: source})


def test_a_measured_size_has_a_range_of_its_own() -> None:
    """Catches: a row measured at 200 tokens that is never bound for 200 tokens, or bound for 2000 too."""
    stated = buckets(CPU)
    assert stated == buckets()
    measured(200)
    ranges = buckets(CPU)
    assert [(b.low, b.high) for b in ranges if b.low <= 200 <= (b.high or 200)] == [(129, 256)]
    assert {b.high for b in ranges} == {b.high for b in stated} | {128, 256}
    assert buckets() == stated
    assert all(one.high is not None and one.high + 1 == two.low for one, two in itertools.pairwise(ranges))


def test_one_token_is_measured_alone() -> None:
    """Catches: a limit of 0 tokens, which no range can have."""
    stated = buckets(CPU)
    measured(1)
    assert buckets(CPU) == stated
