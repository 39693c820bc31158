"""Requests that end early, steps that fail, an engine that dies or hangs, a server that is told to stop."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import pytest

from rapid_llm import LLM

from .conftest import HeldDecoder, mock_llm
from .live import Live, live, until

PATH = "/v1/completions"


def decoder(llm: LLM) -> HeldDecoder:
    return llm._decoder  # type: ignore[return-value]


def begin(server: Live, **fields: Any) -> Any:
    """A connection on which a request was sent, and nothing read."""
    connection = server.connect()
    body = json.dumps({"prompt": "hi", "max_tokens": 200, "ignore_eos": True, **fields})
    connection.request("POST", PATH, body, {"Content-Type": "application/json"})
    return connection


def hang_up(connection: Any) -> None:
    connection.sock.close()


@pytest.fixture
def held() -> Any:
    """A server whose steps wait until `gate` is opened."""
    llm = mock_llm()
    with live(llm, max_concurrent_requests=3, shutdown_timeout=0.3, stall_timeout=0.2) as server:
        decoder(llm).gate.clear()
        yield server
        decoder(llm).gate.set()
        until(lambda: server.server.service.engine.trouble() is not None or server.idle())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(held: Live, stream: bool) -> None:
    """E82. Catches: an answer that is made to its end for nobody, and pages that it keeps."""
    connection = begin(held, stream=stream)
    assert decoder(held.llm).entered.wait(20)
    hang_up(connection)
    until(lambda: held.server.service.slots.used == 0)
    steps = len(decoder(held.llm).steps)
    decoder(held.llm).gate.set()
    until(held.idle)
    assert len(decoder(held.llm).steps) <= steps + 2, "it ran on"


def test_a_client_that_leaves_in_the_queue_holds_no_place(held: Live) -> None:
    """E83. Catches: a place that a request keeps which never ran."""
    connections = [begin(held) for _ in range(3)]
    until(lambda: held.server.service.slots.used == 3)
    status, answer = held.post(PATH, {"prompt": "one more"})
    assert (status, answer["error"]["code"]) == (429, "too_many_requests")
    for connection in connections:
        hang_up(connection)
    until(lambda: held.server.service.slots.used == 0)
    decoder(held.llm).gate.set()
    until(held.idle)
    assert held.text("room again", max_tokens=2)


def test_a_stuck_step_shows_in_health_while_it_lasts(held: Live) -> None:
    """E89. Catches: a health check that looks at the process and not at its progress."""
    assert held.get("/health") == (200, {"status": "ok"})
    connection = begin(held, max_tokens=2)
    until(lambda: held.get("/health")[0] == 503)
    assert "no step has finished" in held.get("/health")[1]["reason"]
    assert held.post(PATH, {"prompt": "x"})[0] == 503
    decoder(held.llm).gate.set()
    assert connection.getresponse().status == 200
    until(lambda: held.get("/health")[0] == 200)


def test_a_failed_step_ends_its_requests_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a server that goes down with a step, a client that waits for ever, and a stream that just stops."""
    llm = mock_llm()
    caplog.set_level(logging.CRITICAL + 1)
    with live(llm) as server:
        wanted = server.text("before", temperature=0, max_tokens=5)
        decoder(llm).fail_at[len(decoder(llm).steps)] = RuntimeError("planted")
        status, answer = server.post(PATH, {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (500, "step_failed"), answer
        assert "planted" in answer["error"]["message"]
        decoder(llm).fail_at[len(decoder(llm).steps) + 2] = RuntimeError("planted")
        *events, error, last = server.events(PATH, {"prompt": "x", "max_tokens": 9})
        assert events[0]["choices"]
        assert error["error"]["code"] == "step_failed"
        assert last == "[DONE]"
        assert server.text("before", temperature=0, max_tokens=5) == wanted
        assert server.get("/health")[0] == 200
        assert "rapid_llm_step_failures_total 2.0" in server.request("GET", "/metrics")[2].decode()


def test_a_dead_engine_is_told_to_everyone(caplog: pytest.LogCaptureFixture) -> None:
    """E89. Catches: requests that wait for a thread that is gone, and a health check that does not notice."""
    llm = mock_llm()
    caplog.set_level(logging.CRITICAL + 1)
    with live(llm) as server:
        decoder(llm).gate.clear()
        found: list[Any] = []
        waiting = [
            threading.Thread(target=lambda: found.append(server.post(PATH, {"prompt": "x"}))),
            threading.Thread(target=lambda: found.append(list(server.events(PATH, {"prompt": "y"})))),
            threading.Thread(target=lambda: found.append(server.post("/v1/embeddings", {"input": "z"}))),
        ]
        waiting[0].start()
        assert decoder(llm).entered.wait(20)
        for thread in waiting[1:]:
            thread.start()
        until(lambda: server.server.service.slots.used == 3)
        until(lambda: len(server.server.service.engine._commands) == 2)
        decoder(llm).fail_at[0] = SystemExit("killed")
        decoder(llm).gate.set()
        for thread in waiting:
            thread.join(20)
            assert not thread.is_alive()
        statuses = sorted(answer[0] for answer in found if isinstance(answer, tuple))
        (stream,) = [answer for answer in found if isinstance(answer, list)]
        assert statuses in ([500, 503], [503, 503])
        assert stream[-2]["error"]["type"] in ("server_error", "unavailable_error")
        status, answer = server.get("/health")
        assert status == 503
        assert "killed" in answer["reason"]
        assert server.post(PATH, {"prompt": "x"})[0] == 503
        assert server.post("/v1/embeddings", {"input": "x"})[0] == 503
        assert server.get("/v1/models")[0] == 200


def test_running_answers_are_finished_at_the_end() -> None:
    """Catches: a shutdown that cuts what it had time for."""
    llm = mock_llm()
    with live(llm, shutdown_timeout=20) as server:
        decoder(llm).gate.clear()
        connection = begin(server, stream=True, max_tokens=6)
        assert decoder(llm).entered.wait(20)
        server.server._loop.call_soon_threadsafe(server.server.begin_shutdown)
        until(lambda: server.server.should_exit)
        decoder(llm).gate.set()
        said = connection.getresponse().read().decode()
        assert said.count('"text"') >= 6
        assert '"finish_reason":"length"' in said
        assert said.endswith("data: [DONE]\n\n")


def test_what_is_not_done_in_time_is_told_so(held: Live) -> None:
    """Catches: a shutdown that waits for ever, or ends streams and answers without a word."""
    stream, plain = begin(held, stream=True), begin(held)
    assert decoder(held.llm).entered.wait(20)
    until(lambda: held.server.service.slots.used == 2)
    held.server._loop.call_soon_threadsafe(held.server.begin_shutdown)
    until(lambda: held.server.service.engine._stopping)
    decoder(held.llm).gate.set()
    said = stream.getresponse().read().decode()
    assert "the server is shutting down" in said
    assert said.endswith("data: [DONE]\n\n")
    answer = plain.getresponse()
    assert answer.status == 503
    assert json.loads(answer.read())["error"]["message"] == "the server is shutting down"
    held.stop()
    held.engine.check()
    assert not held.engine.unfinished


def test_keys() -> None:
    """Catches: a path that a key does not guard, a key that is compared by its beginning."""
    with live(mock_llm(), api_keys=("secret", "other")) as server:
        for path in ("/v1/models", "/metrics", "/v1/report", "/v1/models/mock"):
            assert server.get(path)[0] == 401
        for path in (PATH, "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"):
            status, headers, _ = server.request("POST", path, {"prompt": "x"})
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
        for wrong in ("Bearer secre", "Bearer secrets", "Bearer ", "secret", "Basic secret", "Bearer séc"):
            assert server.get("/v1/models", Authorization=wrong)[0] == 401
        for right in ("Bearer secret", "bearer other"):
            assert server.get("/v1/models", Authorization=right)[0] == 200
        assert server.get("/health")[0] == 200
        assert server.request("GET", "/")[0] == 200
