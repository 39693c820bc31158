"""A real server on a free port, in a thread of this process, and the least client that its tests need."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rapid_llm import LLM
from rapid_llm.server.run import Server, bind
from rapid_llm.server.service import ServerOptions

PATIENCE = 20.0
"""Seconds that a test waits for what must happen soon; a machine may be busy."""


class Live:
    """A running server. `server` is the object itself, `llm` what it serves."""

    def __init__(self, llm: LLM, names: list[str] | None = None, **options: Any) -> None:
        self.llm = llm
        self.socket = bind("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(
            llm, names or ["mock"], ServerOptions(**options), read_bandwidth=(40e9, "given"), log_level="critical"
        )
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def engine(self) -> Any:
        return self.llm._engine

    def start(self) -> Live:
        self._thread.start()
        until(lambda: self.server.started or self.failure is not None)
        assert self.failure is None, self.failure
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            self.server._loop.call_soon_threadsafe(self.server.begin_shutdown)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self.server.serve(sockets=[self.socket]))
        except BaseException as error:
            self.failure = error

    # ---- a client ----------------------------------------------------------------------------------------------------

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body). body: bytes as they are, anything else as JSON."""
        connection = self.connect()
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        status, _, data = self.request("GET", path, headers=headers)
        return status, json.loads(data)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        status, _, data = self.request("POST", path, body, headers)
        return status, json.loads(data)

    def refusal(self, path: str, body: Any) -> tuple[int, str | None, str]:
        """(status, param, message) of a request that is refused."""
        status, answer = self.post(path, body)
        assert status >= 400, answer
        return status, answer["error"]["param"], answer["error"]["message"]

    def complete(self, prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
        status, answer = self.post("/v1/completions", {"model": "mock", "prompt": prompt, **fields})
        assert status == 200, answer
        return answer

    def text(self, prompt: Any = "hi", **fields: Any) -> str:
        return self.complete(prompt, **fields)["choices"][0]["text"]

    def chat(self, content: str = "hi", **fields: Any) -> dict[str, Any]:
        messages = fields.pop("messages", [{"role": "user", "content": content}])
        status, answer = self.post("/v1/chat/completions", {"model": "mock", "messages": messages, **fields})
        assert status == 200, answer
        return answer

    def events(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        """Each event of a stream; the text `[DONE]` last."""
        connection = self.connect()
        try:
            connection.request("POST", path, json.dumps({"stream": True, **body}), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise AssertionError((answer.status, answer.read()))
            assert answer.getheader("content-type", "").startswith("text/event-stream")
            for line in answer:
                if line.startswith(b"data: "):
                    data = line[6:].strip()
                    yield "[DONE]" if data == b"[DONE]" else json.loads(data)
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events but the last, which must be `[DONE]`."""
        *events, last = self.events(path, body)
        assert last == "[DONE]"
        return events

    def idle(self) -> bool:
        """Whether nothing runs, waits, or holds a page or a place."""
        engine = self.engine
        pool = engine.scheduler.pool
        return (
            not engine.unfinished
            and not engine.scheduler.has_work
            and pool.free_pages == pool.usable_pages
            and self.server.service.slots.used == 0
        )


def until(condition: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Wait for something that must come true."""
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@contextmanager
def live(llm: LLM, names: list[str] | None = None, **options: Any) -> Iterator[Live]:
    """A server for as long as the block runs; at its end nothing may be left in the engine."""
    server = Live(llm, names, **options).start()
    try:
        yield server
    finally:
        server.stop()
