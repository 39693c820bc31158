"""A server whose engine has said that it cannot go on."""

from __future__ import annotations

import logging

import pytest

from rapid_llm.engine.errors import EngineEndedError

from .conftest import mock_llm
from .live import live, until


def test_an_engine_that_has_ended_is_told_to_everyone(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a server that stays in the pool of a load balancer although every request of it must fail."""
    llm = mock_llm()
    caplog.set_level(logging.CRITICAL + 1)
    with live(llm) as server:
        assert server.get("/health")[0] == 200
        llm._decoder.fail_at[0] = EngineEndedError("rank 1 is gone")  # type: ignore[attr-defined]
        status, answer = server.post("/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (500, "step_failed")
        assert "rank 1 is gone" in answer["error"]["message"]
        until(lambda: server.get("/health")[0] == 503)
        assert "rank 1 is gone" in server.get("/health")[1]["reason"]
        assert server.post("/v1/completions", {"prompt": "y"})[0] == 503
