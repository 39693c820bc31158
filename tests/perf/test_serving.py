"""Load on servers: a scripted one, and a real one around the mock decoder."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from rapid_llm.perf import serving
from rapid_llm.perf.http import Endpoint, HttpError
from rapid_llm.perf.local_server import ServerError, command, running
from rapid_llm.perf.traffic import Traffic

TRAFFIC = Traffic(rate=float("inf"), requests=3, prompt_tokens=5, output_tokens=4)


class Scripted:
    """answer: events of each request, an exception among them is raised. knows: whether it takes ignore_eos."""

    def __init__(self, answer: list[Any], knows: bool = True, down: int = 0) -> None:
        self.answer, self.knows, self.down = answer, knows, down
        self.bodies: list[Mapping[str, Any]] = []

    async def get(self, path: str) -> Any:
        if path == "/v1/report":
            raise HttpError(404, "no such route")
        assert path == "/v1/models"
        if self.down:
            self.down -= 1
            raise ConnectionRefusedError("refused")
        return {"data": [{"id": "first"}, {"id": "second"}]}

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        assert path == "/v1/completions"
        self.bodies.append(body)
        if "ignore_eos" in body and not self.knows:
            raise HttpError(400, "ignore_eos: unknown field")
        for event in self.answer:
            if isinstance(event, Exception):
                raise event
            yield event


def text(word: str) -> dict[str, Any]:
    return {"choices": [{"text": word, "index": 0}]}


USAGE = {"choices": [], "usage": {"completion_tokens": 4}}
GOOD = [text("a"), text(""), text("b"), {"choices": [{"text": "", "finish_reason": "length"}]}, USAGE]


def run(client: Scripted, *runs: Traffic, model: str | None = None, **options: Any) -> dict[str, Any]:
    return asyncio.run(serving.load(client, model, runs or (TRAFFIC,), **options))


def test_requests_are_what_was_planned() -> None:
    """Catches: answers of another length, a warm-up that counts, prompts that a cache knows, another model."""
    client, told = Scripted(GOOD), []
    found = run(client, TRAFFIC, Traffic(9e9, 2, 5, 4), told=told.append)
    assert found["model"] == "first"
    assert found["server_report"] == {"missing": "404: no such route"}
    assert found["ignore_eos"] is True
    assert [one["completed"] for one in found["runs"]] == [3, 2]
    assert told == found["runs"]
    assert len(client.bodies) == 2 + 3 + 2
    assert {body["max_tokens"] for body in client.bodies} == {4}
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in client.bodies)
    assert len({tuple(body["prompt"]) for body in client.bodies}) == 7
    assert run(Scripted(GOOD), model="second")["model"] == "second"


def test_only_events_with_text_are_tokens_and_usage_counts_them() -> None:
    """Catches: the role or the usage event taken for the first token."""
    (one,) = run(Scripted(GOOD))["runs"]
    assert one["tokens_an_event"] == 2.0
    assert one["output_tokens_per_second"] == pytest.approx(12 / one["seconds"])


def test_a_server_without_ignore_eos_is_told_so_in_the_record() -> None:
    """Catches: every request refused for a field that is not OpenAI's, or answers cut short without a word."""
    client = Scripted(GOOD, knows=False)
    found = run(client)
    assert found["ignore_eos"] is False
    assert found["runs"][0]["completed"] == 3
    assert all("ignore_eos" not in body for body in client.bodies[1:])


def test_failures_are_counted_by_reason_and_the_rest_goes_on() -> None:
    """Catches: one failure that ends the run, an error event or a cut stream that counts as an answer."""
    client = Scripted(GOOD)
    broken = iter([[*GOOD], [*GOOD], [HttpError(429, "full")], [text("a"), {"error": {"message": "lost"}}], GOOD])
    inner = client.events

    async def events(path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        client.answer = next(broken)
        async for event in inner(path, body):
            yield event

    client.events = events  # type: ignore[method-assign]
    (one,) = run(client)["runs"]
    assert one["errors"] == {"429: full": 1, "in the stream: lost": 1}
    assert one["completed"] == 1


def test_a_server_that_refuses_from_the_start() -> None:
    """Catches: a hundred failures in place of one reason."""
    with pytest.raises(HttpError, match="a first request failed: 401: no key"):
        run(Scripted([HttpError(401, "no key")]))
    with pytest.raises(HttpError, match="no text came"):
        run(Scripted([USAGE]))
    with pytest.raises(HttpError, match="lists no model"):
        serving.served_name({"data": []})


def test_a_server_that_is_starting_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a refusal in the moment between the port's being known and its being served."""
    monkeypatch.setattr(serving, "RETRY_S", 0.0)
    assert run(Scripted(GOOD, down=3), patience=60.0)["runs"][0]["completed"] == 3
    with pytest.raises(ConnectionRefusedError):
        run(Scripted(GOOD, down=3))


def test_a_real_server() -> None:
    """Catches: what a stub cannot know: fields that the server refuses, its framing, its usage, its key."""
    pytest.importorskip("fastapi")
    from rapid_llm.engine.random_llm import random_llm
    from tests.server.live import live

    from .support import TINY

    config = replace(TINY, vocab_size=1100, num_tokens=1100)
    llm = random_llm(config, dtype="float32", device="cpu", threads=1, kv_cache_tokens=1024)
    with live(llm, api_keys=("secret",)) as server:
        client = Endpoint.of(server.url, "secret")
        traffic = Traffic(rate=200.0, requests=4, prompt_tokens=9, output_tokens=5)
        found = asyncio.run(serving.load(client, None, [traffic]))
        with pytest.raises(HttpError, match="401"):
            asyncio.run(serving.load(Endpoint.of(server.url), None, [traffic]))
    (one,) = found["runs"]
    assert (one["completed"], one["errors"], found["ignore_eos"]) == (4, {}, True)
    assert "missing" not in found["server_report"]
    assert "native/sample" in json.dumps(found["server_report"])
    assert one["output_tokens_per_second"] == pytest.approx(20 / one["seconds"])
    assert one["ttft_seconds"]["p50"] > 0
    assert one["itl_seconds"]["p99"] > 0


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_server_process_is_found_and_ended() -> None:
    """Catches: a server left behind, an address that is not read, a pipe that fills up and stops the server."""
    code = (
        "import sys, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))\n"
        "print('x' * 200_000, file=sys.stderr)\n"
        "print('tiny: http://127.0.0.1:1234 (Ctrl-C ends)', file=sys.stderr, flush=True)\n"
        "print('y' * 200_000, file=sys.stderr, flush=True)\n"
        "time.sleep(60)"
    )
    with running(python(code)) as url:
        assert url == "http://127.0.0.1:1234"


def test_a_server_that_does_not_start_says_why() -> None:
    """Catches: minutes of waiting for a process that has ended, an error without its words."""
    with (
        pytest.raises(ServerError, match=r"(?s)ended with status 3 .*no such shape"),
        running(python("import sys; print('no such shape', file=sys.stderr); sys.exit(3)")),
    ):
        pytest.fail("it did not start")


def test_the_command_of_a_server() -> None:
    """Catches: an option of the engine that the server is not given."""
    words = command("llama-3.2-1b", None, {"dtype": "bfloat16", "kv_cache_tokens": 4096})
    assert words[1:] == [
        *("-m", "rapid_llm.cli", "serve", "--port", "0", "--log-level", "warning", "--shape", "llama-3.2-1b"),
        *("--dtype", "bfloat16", "--kv-cache-tokens", "4096"),
    ]
    assert command(None, "x.gguf", {})[-2:] == ["--model", "x.gguf"]
