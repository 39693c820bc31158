"""The suite is worth what it refuses: every wrong row must be caught, every right one must pass."""

from __future__ import annotations

import pytest

import rapid_llm.kernels.ops  # noqa: F401  (registers the ops)
from rapid_llm.kernels import registry
from rapid_llm.kernels.ops.block_formats import DECODED
from rapid_llm.kernels.registry import OpSpec
from rapid_llm.verify import faulty_layout, habits
from rapid_llm.verify.conformance import check_callable, variants
from rapid_llm.verify.faulty import FaultyRow, battery, plain_row
from rapid_llm.verify.report import Report
from tests.truths import SHARED

BATTERY = battery()
NEEDS_FULL = {
    ("scale", "answers from memory"),  # shows with a second seed only
    ("scale", "offsets in int32"),  # far tensors are in the full set only
    ("linear", "aliased out cleared"),
    ("attention.decode", "aliased out cleared"),
    ("embedding", "ids clamped"),  # the CPU's IndexError is no case of the interpreter
    ("embedding", "ids wrapped"),
    *((op, faulty_layout.MANY) for op in faulty_layout.FAULTS),  # so many rows are in the full set only
}


def _native(op: OpSpec) -> list[tuple[str, str | None]]:
    rows = [row for row in registry.rows(op.id) if row.is_native]
    return sorted({pair for row in rows for pair in variants(op, row)}, key=str)


RIGHT = [
    (op.id, dtype, scheme)
    for op in registry.ops()
    for dtype, scheme in _native(op)
    if dtype not in ("bf16", "fp16") or scheme not in DECODED  # which differ in how they are read alone
]


def _report(row: FaultyRow, budget: str) -> Report:
    return check_callable(
        registry.get_op(row.op),
        row.fn,
        dtype=row.dtype,
        scheme=row.scheme,
        name=row.id,
        first_failure=True,
        budget=budget,
        truths=SHARED,
    )


@pytest.mark.parametrize("row", BATTERY, ids=lambda row: row.id)
def test_wrong_row_is_refused(row: FaultyRow) -> None:
    """Would go red if a check of the suite, or the case that shows this fault, were lost."""
    budget = "full" if (row.op, row.fault) in NEEDS_FULL else "interpret"
    report = _report(row, budget)
    assert report.failures, f"the {budget} set does not catch it: {report}"
    assert not report.ok


@pytest.mark.parametrize("row", [r for r in BATTERY if r.op in ("scale", "linear", "rope")], ids=lambda row: row.id)
def test_wrong_row_is_refused_by_the_full_set(row: FaultyRow) -> None:
    """Would go red if the full set lost a case that the small one has."""
    report = _report(row, "full")
    assert report.failures, f"not caught: {report}"


@pytest.mark.parametrize(("op", "dtype", "scheme"), RIGHT)
def test_right_row_passes(op: str, dtype: str, scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would go red if a bound were tighter than the arithmetic, or a check refused what the op allows.

    In full where no coarse store hides the arithmetic; the native rows meet the full set in every dtype elsewhere.
    """
    monkeypatch.setattr(habits, "REPEATS", 4)
    report = check_callable(
        registry.get_op(op),
        plain_row(op),
        dtype=dtype,
        scheme=scheme,
        budget="full" if dtype in ("fp32", "uint8") else "interpret",
        seeds=(0,),
        truths=SHARED,
    )
    assert report.ok, str(report)
