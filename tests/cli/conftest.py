"""What tests of several commands ask for."""

from __future__ import annotations

from typing import Any

import pytest

from .support import FakeLLM


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a FakeLLM in place of the model; returns a function that makes it and one list of what it was made with."""

    def put(*answers: list[Any]) -> FakeLLM:
        llm = FakeLLM(*answers)
        llm.made = []  # type: ignore[attr-defined]

        def make(model: str | None, options: dict[str, Any]) -> FakeLLM:
            llm.made.append((model, options))  # type: ignore[attr-defined]
            return llm

        monkeypatch.setattr("rapid_llm.cli.generate.make_llm", make)
        monkeypatch.setattr("rapid_llm.cli.chat.make_llm", make)
        return llm

    return put
