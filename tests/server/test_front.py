"""The door in front of replicas, with replicas that need no Ray: scripted ones, and whole servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.requests import Request

from rapid_llm import LLM
from rapid_llm.platform import default_threads
from rapid_llm.server import front as front_module
from rapid_llm.server.front import Call, Front, ReplicaLostError, Start, labelled
from rapid_llm.server.replica import ReplicaServer, ReplicaSpec
from rapid_llm.server.service import ServerOptions

from .conftest import mock_llm


class Scripted:
    """Answers with its name, in two pieces. dies: before an answer, within one, its engine alone, or
    not."""

    def __init__(self, name: str, dies: str = "") -> None:
        self.name = name
        self.dies = dies
        self.calls: list[Call] = []
        self.closed = 0
        self.gate: asyncio.Event | None = None

    async def answer(self, call: Call) -> AsyncGenerator[Start | bytes, None]:
        self.calls.append(call)
        if self.dies == "engine":
            yield Start(503, ())
            yield b"the engine has ended"
            return
        if self.dies == "before":
            raise ReplicaLostError(f"{self.name} is gone")
        try:
            yield Start(200, (("content-type", "text/plain"), ("x-replica", self.name)))
            yield b"I am "
            if self.dies == "within":
                raise ReplicaLostError(f"{self.name} is gone")
            if self.gate is not None:
                await self.gate.wait()
            yield self.name.encode()
        finally:
            self.closed += 1

    async def trouble(self) -> str | None:
        if self.dies:
            raise ReplicaLostError(f"{self.name} is gone")
        return None


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


async def ask(
    front: Front, method: str, path: str, body: Any = None, *, gone: asyncio.Event | None = None, **headers: str
) -> Answer:
    """One request; gone: the client leaves when it is set."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    names = {"content-type": "application/json", **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(n.encode(), v.encode()) for n, v in names.items()],
    }
    pieces = [{"type": "http.request", "body": raw, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if pieces:
            return pieces.pop()
        await (asyncio.Event() if gone is None else gone).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    response = await front(Request(scope, receive))
    await response(scope, receive, send)
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def all_of_it() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(all_of_it())


def test_a_request_goes_where_its_beginning_is_known() -> None:
    """Catches: requests that are spread without regard to what replicas know, headers or bodies that are lost."""

    async def work() -> None:
        replicas = [Scripted("a"), Scripted("b")]
        front = Front(replicas)
        where = []
        for text in ("x", "y", "x", "y", "y"):
            answer = await ask(front, "POST", "/v1/completions", {"prompt": text * 600}, authorization="Bearer k")
            assert (answer.status, answer.body) == (200, b"I am " + answer.headers["x-replica"].encode())
            where.append(answer.headers["x-replica"])
        assert where == ["a", "b", "a", "b", "b"]
        assert front.router.loads == [0, 0]
        call = replicas[0].calls[0]
        assert (call.method, call.path, json.loads(call.body)) == ("POST", "/v1/completions", {"prompt": "x" * 600})
        assert dict(call.headers)["authorization"] == "Bearer k"

    run(work)


@pytest.mark.parametrize("dies", ["before", "engine"])
def test_a_replica_that_is_gone_is_passed_over_and_comes_back(dies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a request that fails although another replica is there, one that is answered twice, a replica that is
    never asked again."""
    monkeypatch.setattr(front_module, "PING_S", 0.01)

    async def work() -> None:
        replicas = [Scripted("a", dies), Scripted("b")]
        front = Front(replicas)
        assert (await ask(front, "POST", "/v1/completions", {"prompt": "x"})).body == b"I am b"
        assert front.router.down == {0}
        health = await ask(front, "GET", "/health")
        assert health.status == 200
        assert json.loads(health.body)["status"] == "degraded"
        replicas[0].dies = ""
        while front.router.down:
            await asyncio.sleep(0.005)
        assert json.loads((await ask(front, "GET", "/health")).body)["status"] == "ok"
        replicas[0].dies = replicas[1].dies = dies
        answer = await ask(front, "POST", "/v1/completions", {"prompt": "x"})
        assert answer.status == 503
        assert json.loads(answer.body)["error"]["message"] == "no replica is there"
        assert (await ask(front, "GET", "/health")).status == 503
        assert front.router.loads == [0, 0]
        for task in front._looking.values():
            task.cancel()

    run(work)


def test_an_answer_that_has_begun_is_not_begun_again() -> None:
    """Catches: half an answer that is followed by a whole one of another replica, and an end that looks well."""

    async def work() -> None:
        replicas = [Scripted("a", "within"), Scripted("b")]
        front = Front(replicas)
        with pytest.raises(ReplicaLostError):
            await ask(front, "POST", "/v1/completions", {"prompt": "x"})
        assert replicas[1].calls == []
        assert front.router.loads == [0, 0]
        assert front.router.down == {0}
        for task in front._looking.values():
            task.cancel()

    run(work)


def test_a_client_that_leaves_ends_its_request() -> None:
    """Catches: answers that nobody reads and that count for ever."""

    async def work() -> None:
        replica, gone = Scripted("a"), asyncio.Event()
        replica.gate = asyncio.Event()
        front = Front([replica])
        asked = asyncio.create_task(ask(front, "POST", "/v1/completions", {"prompt": "x"}, gone=gone))
        while not replica.calls:
            await asyncio.sleep(0)
        assert front.router.loads == [1]
        gone.set()
        await asked
        assert front.router.loads == [0]
        assert replica.closed == 1

    run(work)


def test_a_body_that_is_too_long_reaches_no_replica() -> None:
    """Catches: 100 MB in the memory of every process that they pass."""

    async def work() -> None:
        replica = Scripted("a")
        front = Front([replica], max_body_bytes=100)
        assert (await ask(front, "POST", "/v1/completions", b"x" * 101)).status == 413
        assert replica.calls == []
        assert (await ask(front, "POST", "/v1/completions", b"{broken")).status == 200  # its replica says what it is

    run(work)


def test_samples_are_told_apart() -> None:
    """Catches: two samples of one name and label, a family that is declared twice or split."""
    one = '# HELP a What a is\n# TYPE a counter\na 1.0\n# HELP b And b\n# TYPE b gauge\nb{x="y"} 2.0\n'
    assert labelled({0: one, 2: one.replace("1.0", "3.0")}) == (
        '# HELP a What a is\n# TYPE a counter\na{replica="0"} 1.0\na{replica="2"} 3.0\n'
        '# HELP b And b\n# TYPE b gauge\nb{replica="0",x="y"} 2.0\nb{replica="2",x="y"} 2.0\n'
    )


class MockSpec(ReplicaSpec):
    def make(self) -> LLM:
        return mock_llm()


def test_whole_servers_behind_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a stream that is not one, a key that the door does not hand on, errors in another shape, an engine that
    goes on for a client who left, a prompt that is computed anew because it went elsewhere."""
    monkeypatch.setattr("rapid_llm.server.replica.measured_bandwidth", lambda device: (1e9, "given"))

    async def work() -> None:
        spec = MockSpec(None, None, {}, ("mock",), ServerOptions(api_keys=("secret",)))
        replicas = [ReplicaServer(spec) for _ in range(2)]
        front, key = Front(replicas), {"authorization": "Bearer secret"}
        assert (await ask(front, "POST", "/v1/completions", {"prompt": "x"})).status == 401
        assert (await ask(front, "GET", "/metrics")).status == 401
        assert (await ask(front, "GET", "/health")).status == 200
        body = {"prompt": "a long beginning " * 10, "max_tokens": 5, "temperature": 0}
        first = json.loads((await ask(front, "POST", "/v1/completions", body, **key)).body)
        again = json.loads((await ask(front, "POST", "/v1/completions", body, **key)).body)
        assert again["choices"] == first["choices"]
        streamed = await ask(front, "POST", "/v1/completions", {**body, "stream": True}, **key)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        events = [line[6:] for line in streamed.body.decode().splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == first["choices"][0]["text"]
        wrong = await ask(front, "POST", "/v1/completions", {"prompt": 5}, **key)
        assert (wrong.status, json.loads(wrong.body)["error"]["param"]) == (422, "prompt")
        metrics = (await ask(front, "GET", "/metrics", **key)).body.decode()
        assert 'rapid_llm_requests_running{replica="0"} 0.0' in metrics
        assert 'rapid_llm_requests_running{replica="1"} 0.0' in metrics
        gone = asyncio.Event()
        long = {**body, "max_tokens": 80, "stream": True, "ignore_eos": True}
        asked = asyncio.create_task(ask(front, "POST", "/v1/completions", long, gone=gone, **key))
        while not any(front.router.loads):
            await asyncio.sleep(0)
        gone.set()
        await asked
        engines = [replica._service.served.engine for replica in replicas]
        while any(engine.unfinished for engine in engines):
            await asyncio.sleep(0.01)
        for replica in replicas:
            replica._service.stop()

    run(work)


def test_replicas_share_the_threads_of_a_cpu() -> None:
    """Catches: replicas that each take the whole machine, and a number that was asked for and is not kept."""

    def threads(count: int, **engine: Any) -> Any:
        spec = ReplicaSpec(None, None, {"device": "cpu", **engine}, ("m",), ServerOptions())
        assert spec.gpus == 0
        return spec.placed(count).engine["threads"]

    assert threads(1) == default_threads()
    assert threads(2) == max(default_threads() // 2, 1)
    assert threads(2, tensor_parallel=10**6) == 1
    assert threads(2, threads=3) == 3
