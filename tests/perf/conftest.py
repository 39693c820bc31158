"""What tests of whole runs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rapid_llm.bench.load import Load
from rapid_llm.bench.summary import Summary


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    """Torch's threads are the process's: later tests get back what they had."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that nobody else uses, looked at without waiting."""
    quiet = Load(0.5, 0.0, 1, None)
    monkeypatch.setattr("rapid_llm.bench.results.require_idle", lambda **given: quiet)
    monkeypatch.setattr("rapid_llm.bench.results.require_normal_threads", lambda: Summary(1, 0.1, 0.1, 0.1))
    monkeypatch.setattr("rapid_llm.bench.load.LoadWatch.stop", lambda self: quiet)
