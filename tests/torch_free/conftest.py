"""Fixtures of the torch-free tests: a scratch op, and probe results that nothing else sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rapid_llm.kernels.registry import dispatcher, evidence, overrides, probes
from tests import scratch


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Remembered probes go to a folder of the test's own, and are forgotten with it."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(overrides, "_from_environment", {})  # else reported when the tests end
    probes.forget()
    yield
    probes.forget()
    dispatcher.forget(None)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The name of an importable module with the scratch rows."""
    return scratch.counted_module(monkeypatch, tmp_path)


@pytest.fixture
def op(module: str) -> Iterator[str]:
    """The scratch op with its native row; returns the module's name."""
    with scratch.registered(scratch.op_spec(), scratch.row("native/scratch", f"{module}:native", priority=0)):
        yield module
    for name in ("fast/scratch", "slow/scratch"):
        evidence.forget(name)
