"""Which source a figure was measured on."""

from __future__ import annotations

from rapid_llm.kernels.registry import KernelSpec, get_op
from rapid_llm.kernels.registry.digest import source_of


def source_digest(row: KernelSpec) -> str | None:
    """Changes with whatever the row's answers are made of; None where its source cannot be read."""
    source = source_of(row, get_op(row.op))
    return None if source is None else source.digest + source.extension
