"""The suite is worth what it refuses: every wrong row must be caught, every right one must pass."""

from __future__ import annotations

import pytest

import rapid_llm.kernels.ops  # noqa: F401  (registers the ops)
from rapid_llm.kernels import registry
from rapid_llm.verify.conformance import check_callable
from rapid_llm.verify.faulty import FaultyRow, battery, plain_row
from rapid_llm.verify.ulp import LABELS

RIGHT = [
    (op.id, dtype, scheme)
    for op in registry.ops()
    for scheme in (op.schemes or (None,))
    for dtype in op.dtypes
    if dtype in LABELS and not (op.id == "embedding" and (dtype == "uint8") == (scheme == "unquantized"))
]


@pytest.mark.parametrize("row", battery(), ids=lambda row: row.id)
def test_wrong_row_is_refused(row: FaultyRow) -> None:
    """Would go red if a check of the suite, or the case that shows this fault, were lost."""
    report = check_callable(
        registry.get_op(row.op), row.fn, dtype=row.dtype, scheme=row.scheme, name=row.id, first_failure=True
    )
    assert not report.ok, f"not caught: {report}"
    assert report.failures


@pytest.mark.parametrize(("op", "dtype", "scheme"), RIGHT)
def test_right_row_passes(op: str, dtype: str, scheme: str | None) -> None:
    """Would go red if a bound were tighter than the arithmetic, or a check refused what the op allows."""
    report = check_callable(registry.get_op(op), plain_row(op), dtype=dtype, scheme=scheme)
    assert report.ok, str(report)
