"""The scratch op with tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rapid_llm.kernels.registry import dispatcher, evidence
from tests import scratch


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The scratch op with its native row; returns the name of the module that holds its functions."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    module = scratch.counted_module(monkeypatch, tmp_path)
    with scratch.registered(scratch.op_spec(), scratch.row("native/scratch", f"{module}:native", priority=0)):
        yield module
    evidence.forget("fast/scratch")
    dispatcher.forget(None)
