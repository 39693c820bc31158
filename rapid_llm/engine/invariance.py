"""Deterministic mode's choice of rows: batch-invariant ones wherever an op has one, and which ops have none.

A row that does not declare it may give a token other bits in a batch of another size. As long as one op of a model has
only such rows, determinism rests on the schedule: one request at a time, in chunks of fixed places.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rapid_llm.kernels import Selected, dispatch
from rapid_llm.kernels.registry import ForcedRowError, NoKernelError


def choose(**key: Any) -> Selected:
    """As `dispatch(**key)`, among the batch-invariant rows; among all where none of those takes the call, or where
    another one is forced."""
    try:
        return dispatch(**key, batch_invariant=True)
    except (NoKernelError, ForcedRowError):
        return dispatch(**key)


def line(bindings: Iterable[tuple[str, str, Selected]]) -> str:
    """What `LLM.explain()` says of the rows in use."""
    variant = sorted({op for _, op, handle in bindings if not handle.spec.batch_invariant})
    if not variant:
        return "rows: all batch-invariant; one request at a time"
    return f"one request at a time, for these have no batch-invariant row here: {', '.join(variant)}"
