"""Whether the cases that a row takes can tell right from wrong: a row without such cases must stay unverified."""

from __future__ import annotations

import pytest

import rapid_llm.kernels.ops  # noqa: F401  (registers the ops)
from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import KernelSpec
from rapid_llm.verify import mutants
from rapid_llm.verify.conformance import check_callable

ELSEWHERE = {
    "deepep": "exchanges between several ranks; these cases have one",
    "deepgemm": "rounds its input to fp8, under which a truncated store cannot be told from a rounded one",
}
"""Backends whose rows these cases cannot prove, and why; they stay unverified."""


def _narrow() -> list[KernelSpec]:
    """The rows that few cases suit and that no run here proves: for GPUs alone, and of some shapes alone.

    Of the others `kernels verify` asks the same whenever it makes a record.
    """
    every = [row for op in registry.ops() for row in registry.rows(op.id)]
    chosen = [r for r in every if r.devices == ("cuda",) and r.shape.require and not r.name.endswith(".fp16")]
    # The last of those that meet the same cases under the same bounds.
    return list({mutants.key(registry.get_op(r.op), r): r for r in chosen if r.backend not in ELSEWHERE}.values())


@pytest.mark.parametrize("op", registry.ops(), ids=lambda op: op.id)
def test_every_op_has_enough_wrong_rows(op: registry.OpSpec) -> None:
    """Catches: an op that was declared without the faults that its cases must show."""
    row = next(row for row in registry.rows(op.id) if row.is_native)
    tried = list(mutants.mutants_of(op, row))
    assert len(tried) >= mutants.ENOUGH
    assert sum(m.fault in mutants._CRITICAL for m in tried) >= 5


@pytest.mark.parametrize("row", _narrow(), ids=lambda row: row.name)
def test_the_cases_of_a_row_refuse_every_critical_fault(row: KernelSpec) -> None:
    """Catches: a row whose shapes, layouts or roundings leave no case that shows a dropped tail, a wrong stride, a
    swallowed NaN or a truncated store, for any row of its op."""
    score = mutants.score(registry.get_op(row.op), row, budget="full", check=check_callable)
    assert score.enough, score
