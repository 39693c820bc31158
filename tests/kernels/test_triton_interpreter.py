"""The Triton path of every native row, run by Triton's interpreter through the conformance suite.

Catches: a Triton kernel that is wrong where the PyTorch path of the same row is right, and a row whose Triton path is
never taken. bf16 is left out: the interpreter truncates there, so a pass would prove nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

import rapid_llm.kernels.ops  # noqa: F401  (declares the ops)
from rapid_llm.kernels import registry
from rapid_llm.kernels.ops.triton_support import INTERPRETED, broken
from rapid_llm.kernels.registry import probes
from rapid_llm.verify.conformance import check_row
from tests.kernels.examples import by_triton

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1, as `make test-interpreter` sets it"),
]

MAX_PROGRAMS = 100
"""Of one launch: a program takes the interpreter about a millisecond."""

ROWS = [
    (op.id, row.name, dtype, scheme)
    for op in registry.ops()
    for row in registry.rows(op.id)
    if row.is_native
    for scheme in (row.schemes or (None,))
    if by_triton(op.id, scheme)
    for dtype in row.dtypes
    if dtype != "bf16" and probes.load(op.cases)(dtype, "cpu", scheme, budget="interpret")
]


def test_every_native_row_is_run() -> None:
    """Catches: a scheme without cases, which would pass unseen."""
    wanted = {
        (r.name, s)
        for op in registry.ops()
        for r in registry.rows(op.id)
        if r.is_native
        for s in r.schemes or (None,)
        if by_triton(op.id, s)
    }
    assert {(name, scheme) for _, name, _, scheme in ROWS} == wanted


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The grid of every launch that the interpreter makes during the test."""
    from triton.runtime.interpreter import GridExecutor

    seen: list[tuple[int, ...]] = []
    call = GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.grid)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    return seen


@pytest.mark.parametrize(("op_id", "row", "dtype", "scheme"), ROWS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, on the NaN and overflow that cases put in
def test_triton_path(op_id: str, row: str, dtype: str, scheme: str | None, grids: list[tuple[int, ...]]) -> None:
    report = check_row(op_id, row, dtype=dtype, scheme=scheme, budget="interpret")
    report.failures = [f for f in report.failures if "bfloat16" not in f.case]  # results cast to bf16: see above
    assert report.ok, report
    assert op_id not in broken(), broken()
    assert grids, f"{row} never launched a Triton kernel"
    largest = max(grids, key=lambda grid: _programs(grid))
    assert _programs(largest) <= MAX_PROGRAMS, f"grid {largest} is too big for the interpreter; shrink the case"


def _programs(grid: tuple[int, ...]) -> int:
    programs = 1
    for size in grid:
        programs *= size
    return programs
