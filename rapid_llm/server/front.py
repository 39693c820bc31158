"""The door in front of several replicas: sends each request to one of them, and passes on what it answers.

Knows nothing of how replicas run; `replicas` runs them on Ray Serve. Invariant: a request counts as in progress at its
replica until its answer is over, however it ends, and is sent to another one only if nothing of an answer was seen.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .errors import ApiError
from .routing import Router, opening

MOST_BODY_BYTES: Final = 1 << 25
"""Of a request, where no limit is set: replicas know the context and have a closer one."""

BODY_S: Final = 60.0
"""Seconds that a request's body may take."""

UNAVAILABLE: Final = 503
"""The status of a replica whose engine cannot answer, so that another one is asked."""

PING_S: Final = 1.0
"""Between two looks for a replica that is lost, and how long one may take to say that it is there."""


class ReplicaLostError(Exception):
    """A replica is gone."""


class Call(NamedTuple):
    """A request as it is passed on. headers: pairs of lower-case names and values."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Start(NamedTuple):
    """The beginning of an answer; its body follows in pieces."""

    status: int
    headers: tuple[tuple[str, str], ...]


class Replica(Protocol):
    """What the door needs of a replica; both raise `ReplicaLostError` where it is gone."""

    def answer(self, call: Call) -> AsyncGenerator[Start | bytes, None]:
        """A `Start`, then bytes. Closing it ends the request."""
        ...

    async def trouble(self) -> str | None:
        """Why it cannot answer; None where it can."""
        ...


class Front:
    """Made in the event loop that serves. max_body_bytes: of a request, None for the default."""

    def __init__(self, replicas: Sequence[Replica], *, max_body_bytes: int | None = None) -> None:
        self.router = Router(len(replicas))
        self._replicas = replicas
        self._max_body_bytes = MOST_BODY_BYTES if max_body_bytes is None else max_body_bytes
        self._looking: dict[int, asyncio.Task[None]] = {}

    async def __call__(self, request: Request) -> Response:
        """The answer to a request."""
        try:
            if request.method == "GET" and request.url.path == "/health":
                return await self._health()
            call = await self._read(request)
            if call.method == "GET" and call.path == "/metrics":
                return await self._metrics(call)
            return await self._forward(call)
        except ApiError as error:
            return JSONResponse(error.json(), error.status, error.headers)

    async def _forward(self, call: Call) -> Response:
        text = _opening(call.body)
        while True:
            index = self.router.begin(text)
            if index is None:
                raise ApiError(503, "no replica is there", code="engine_unavailable", headers={"Retry-After": "5"})
            parts = self._replicas[index].answer(call)
            try:
                start = await anext(parts)
            except ReplicaLostError:
                self.router.end(index)
                self._lost(index)
                continue
            except BaseException:
                self.router.end(index)
                raise
            if isinstance(start, Start) and start.status != UNAVAILABLE:
                return _Relay(self, index, start, parts)
            await parts.aclose()
            self.router.end(index)
            self._lost(index)

    async def _health(self) -> Response:
        """200 as long as somebody can answer."""
        states = await asyncio.gather(*(self._state(index) for index in range(len(self._replicas))))
        good = any(state is None for state in states)
        told = [{"replica": i, "status": "ok" if state is None else state} for i, state in enumerate(states)]
        status = "ok" if not any(states) else "degraded" if good else "unavailable"
        return JSONResponse({"status": status, "replicas": told}, 200 if good else 503)

    async def _state(self, index: int) -> str | None:
        try:
            return await asyncio.wait_for(self._replicas[index].trouble(), PING_S)
        except TimeoutError:
            return f"no word for {PING_S:g} s"
        except ReplicaLostError as error:
            self._lost(index)
            return str(error)

    async def _metrics(self, call: Call) -> Response:
        """The samples of every replica that is there, each with a label that says whose it is."""
        texts: dict[int, str] = {}
        for index in range(len(self._replicas)):
            if index in self.router.down:
                continue
            try:
                parts = [part async for part in self._replicas[index].answer(call)]
            except ReplicaLostError:
                self._lost(index)
                continue
            start, body = parts[0], b"".join(part for part in parts[1:] if isinstance(part, bytes))
            if isinstance(start, Start) and start.status != 200:
                return Response(body, start.status, dict(start.headers))
            texts[index] = body.decode()
        return Response(labelled(texts), media_type="text/plain; version=0.0.4")

    def _lost(self, index: int) -> None:
        self.router.lost(index)
        if index not in self._looking:
            self._looking[index] = asyncio.create_task(self._look_for(index))

    async def _look_for(self, index: int) -> None:
        while index in self.router.down:
            await asyncio.sleep(PING_S)
            try:
                if await asyncio.wait_for(self._replicas[index].trouble(), PING_S) is None:
                    self.router.found(index)
            except (ReplicaLostError, TimeoutError):
                continue  # it is looked for until it is there
        del self._looking[index]

    async def _read(self, request: Request) -> Call:
        body, limit = bytearray(), self._max_body_bytes
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise ApiError(413, f"the body is longer than {limit} bytes", code="body_too_long")
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_S:g} s", code="body_timeout") from None
        except ClientDisconnect:
            raise ApiError(400, "the client left before its request was whole") from None
        headers = tuple((name.lower(), value) for name, value in request.headers.items())
        return Call(request.method, request.url.path, request.url.query, headers, bytes(body))


class _Relay(StreamingResponse):
    """A replica's answer, passed on. Its end, whatever the cause, is the end of the request."""

    def __init__(self, front: Front, index: int, start: Start, parts: AsyncGenerator[Start | bytes, None]) -> None:
        super().__init__(self._body(parts), start.status)
        self.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in start.headers]
        self._front, self._index, self._parts = front, index, parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ReplicaLostError:
            self._front._lost(self._index)
            raise  # the answer has begun: an end of the connection is all that can still tell
        finally:
            self._front.router.end(self._index)
            await self._parts.aclose()

    async def _body(self, parts: AsyncGenerator[Start | bytes, None]) -> AsyncGenerator[bytes, None]:
        async for part in parts:
            if isinstance(part, bytes):
                yield part


def labelled(texts: dict[int, str]) -> str:
    """Prometheus' text format of several replicas as one: their samples by metric, each with a label `replica`."""
    families: dict[str, list[str]] = {}
    for index, text in texts.items():
        lines: list[str] = families.setdefault("", [])
        for line in text.splitlines():
            if line.startswith("# "):
                lines = families.setdefault(line.split(" ")[2], [])
                if line not in lines:
                    lines.append(line)
            elif line:
                name, brace, rest = line.partition("{")
                if brace:
                    lines.append(f'{name}{{replica="{index}",{rest}')
                else:
                    name, _, rest = line.partition(" ")
                    lines.append(f'{name}{{replica="{index}"}} {rest}')
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _opening(body: bytes) -> bytes:
    """What the request shares with others; nothing where it is none that a model answers: its replica says why."""
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        return b""
    return opening(found) if isinstance(found, dict) else b""
