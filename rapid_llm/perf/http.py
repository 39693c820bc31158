"""The least HTTP/1.1 client that a load needs: one connection a request, streams read as they come.

A client library would add its own queue, pool and threads to what is measured.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

LIMIT: Final = 1 << 20
"""Longest line or chunk header, in bytes."""

MESSAGE: Final = 300
"""Characters of a refusal that are kept."""


class HttpError(Exception):
    """The server refused, broke off, or said what is no HTTP. status: 0 where there was none."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}" if status else message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an OpenAI-compatible server is. headers: of every request."""

    host: str
    port: int
    base: str
    secure: bool
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> Endpoint:
        """From `http://host:8000`, with or without `/v1`. Raises `ValueError` for what is no such address."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"--serve {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--serve {url!r} is no address; use one such as http://127.0.0.1:8000, or local")
        secure = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        return cls(parts.hostname, port or (443 if secure else 80), base, secure, headers)

    async def get(self, path: str) -> Any:
        """The JSON of an answer. Raises `HttpError`."""
        async with _Exchange(self, "GET", path, None) as exchange:
            return _json(await exchange.read())

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Each event of the stream that answers `body`, as JSON, until `[DONE]`. Raises `HttpError`, for a stream that
        ends without it too."""
        async with _Exchange(self, "POST", path, json.dumps(body).encode()) as exchange:
            async for line in exchange.lines():
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield _json(data)
        raise HttpError(0, "the stream ended without [DONE]")


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise HttpError(0, f"not JSON: {data[:MESSAGE]!r}") from None


class _Exchange:
    """One request and its answer, whose status is below 400."""

    def __init__(self, endpoint: Endpoint, method: str, path: str, body: bytes | None) -> None:
        self._endpoint = endpoint
        shown = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        lines = {"Host": f"{shown}:{endpoint.port}", "Connection": "close", **endpoint.headers}
        if body is not None:
            lines |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        head = [f"{method} {endpoint.base}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items())]
        self._request = "\r\n".join([*head, "", ""]).encode() + (body or b"")

    async def __aenter__(self) -> _Exchange:
        context = ssl.create_default_context() if self._endpoint.secure else None
        self._reader, self._writer = await asyncio.open_connection(
            self._endpoint.host, self._endpoint.port, ssl=context, limit=LIMIT
        )
        try:
            self._writer.write(self._request)
            await self._writer.drain()
            status = await self._head()
            if status >= 400:
                raise HttpError(status, _reason(await self.read()))
        except BaseException:
            self._writer.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._writer.close()

    async def _head(self) -> int:
        first = await self._line()
        parts = first.split(None, 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            raise HttpError(0, f"not HTTP: {first[:MESSAGE]!r}" if first else "the connection was closed")
        self._headers: dict[str, str] = {}
        while line := (await self._line()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            self._headers[name.strip().lower()] = value.strip()
        return int(parts[1])

    async def _line(self) -> bytes:
        try:
            return await self._reader.readline()
        except ValueError:
            raise HttpError(0, f"a line of more than {LIMIT} bytes") from None

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self._pieces()])

    async def lines(self) -> AsyncIterator[bytes]:
        """Lines of the body, each as soon as it is there."""
        rest = b""
        async for piece in self._pieces():
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    async def _pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes: in chunks, of a given length, or up to the end of the connection."""
        if "chunked" in self._headers.get("transfer-encoding", "").lower():
            while size := _size(await self._line()):
                yield await self._exactly(size)
                await self._line()
            return
        left = int(self._headers.get("content-length", "-1"))
        while left:
            piece = await self._reader.read(min(left, LIMIT) if left > 0 else LIMIT)
            if not piece:
                if left > 0:
                    raise HttpError(0, f"the connection was closed {left} bytes early")
                return
            left -= len(piece) if left > 0 else 0
            yield piece

    async def _exactly(self, size: int) -> bytes:
        try:
            return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise HttpError(0, f"the connection was closed {size - len(error.partial)} bytes early") from None


def _size(line: bytes) -> int:
    try:
        return int(line.split(b";")[0], 16)
    except ValueError:
        raise HttpError(
            0, "the connection was closed within the answer" if not line else f"no chunk: {line!r}"
        ) from None


def _reason(body: bytes) -> str:
    """What an error's body says, as OpenAI's API has it, or its text."""
    try:
        return str(json.loads(body)["error"]["message"])[:MESSAGE]
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()[:MESSAGE] or "no reason given"
