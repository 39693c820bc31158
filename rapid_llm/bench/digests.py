"""Which source a figure was measured on: the registry's digest of a row if it has one, else of its target's file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path

from rapid_llm.kernels.registry import KernelSpec


def source_digest(row: KernelSpec) -> str:
    """A short text that changes with the row's source."""
    if importlib.util.find_spec("rapid_llm.kernels.registry.digest") is not None:
        module = importlib.import_module("rapid_llm.kernels.registry.digest")
        return str(module.row_digest(row))
    found = importlib.util.find_spec(row.target.partition(":")[0])
    if found is None or found.origin is None or not Path(found.origin).is_file():
        return "unknown"
    return "file:" + hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()[:16]
