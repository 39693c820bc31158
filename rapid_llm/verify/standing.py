"""Whether a row declares that it takes a call: its shapes and layouts against the call's facts."""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Any

from rapid_llm.kernels.registry import KernelSpec, OpSpec
from rapid_llm.kernels.registry.dispatcher import dims_reader, with_sm
from rapid_llm.kernels.registry.facts import bind, read
from rapid_llm.kernels.registry.filters import misfits


class Standing(enum.Enum):
    """TAKEN: the row must be right. FOREIGN_LAYOUT: it must be right or raise. OUTSIDE: it is not asked."""

    TAKEN = "taken"
    FOREIGN_LAYOUT = "foreign layout"
    OUTSIDE = "outside"


def standing(op: OpSpec, row: KernelSpec | None, values: dict[str, Any], out: Any = None) -> Standing:
    """How `row` stands to a call with the arguments `values` (by name) and `out`, installed here or not."""
    if row is None:
        return Standing.TAKEN
    bound, _ = bind(op, (), values)
    facts = replace(read(op, dims_reader(op), bound, out), allow=frozenset(row.roundings), prepack=True)
    codes = {reason.code for reason in misfits(row, with_sm(facts))}
    if not codes:
        return Standing.TAKEN
    return Standing.FOREIGN_LAYOUT if codes == {"layout"} else Standing.OUTSIDE
