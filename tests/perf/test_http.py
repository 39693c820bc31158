"""The client against a server that says whatever it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rapid_llm.perf.http import Endpoint, HttpError


def exchange(
    answer: bytes | list[bytes], ask: Callable[[Endpoint], Awaitable[Any]], base: str = ""
) -> tuple[Any, bytes]:
    """What `ask` gives, and the request that the server saw. answer: written piece by piece."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"content-length" in line.lower()), 0
        )
        seen.append(head + await reader.readexactly(length))
        for piece in [answer] if isinstance(answer, bytes) else answer:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async def run() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await ask(Endpoint.of(f"http://127.0.0.1:{port}{base}", "secret"))

    return asyncio.run(run()), seen[0] if seen else b""


async def events(endpoint: Endpoint) -> list[Any]:
    return [event async for event in endpoint.events("/v1/completions", {"prompt": "é"})]


async def get(endpoint: Endpoint) -> Any:
    return await endpoint.get("/v1/models")


STREAM = b'data: {"a": 1}\r\n\r\n: a comment\r\n\r\ndata:{"a": 2}\n\ndata: [DONE]\n\n'
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(*sizes: int) -> list[bytes]:
    """The stream in chunks of these sizes and one of the rest, each chunk's frame in a piece of its own."""
    pieces, at = [OK + b"Transfer-Encoding: chunked\r\n\r\n"], 0
    for size in (*sizes, len(STREAM) - sum(sizes)):
        pieces += [f"{size:x};x=y\r\n".encode(), STREAM[at : at + size] + b"\r\n"]
        at += size
    return [*pieces, b"0\r\n\r\n"]


@pytest.mark.parametrize(
    "answer",
    [
        chunked(),
        chunked(3, 5, 11, 1),
        OK + b"\r\n" + STREAM,
        OK + f"content-length: {len(STREAM)}\r\n\r\n".encode() + STREAM,
    ],
    ids=["one chunk", "chunks that cut lines", "up to the end", "of known length"],
)
def test_streams_come_apart_where_their_events_do(answer: Any) -> None:
    """Catches: an event lost or torn where a chunk ends, comments taken for events, [DONE] parsed."""
    found, request = exchange(answer, events)
    assert found == [{"a": 1}, {"a": 2}]
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer secret" in head
    assert json.loads(body) == {"prompt": "é"}


def test_a_get_and_an_address_with_a_path() -> None:
    """Catches: /v1 twice, a prefix that is dropped."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n" + b'{"data": []}'
    for base in ("", "/v1", "/v1/"):
        found, request = exchange(answer, get, base)
        assert found == {"data": []}
        assert request.startswith(b"GET /v1/models HTTP/1.1\r\n")
    assert exchange(answer, get, "/here/v1")[1].startswith(b"GET /here/v1/models ")


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (
            b'HTTP/1.1 429 Busy\r\nContent-Length: 31\r\n\r\n{"error": {"message": "be calm"}}'[:-2] + b"",
            429,
            "be calm|error",
        ),
        (b"HTTP/1.1 500 No\r\n\r\nplain words", 500, "500: plain words"),
        (OK + b"\r\n" + b'data: {"a": 1}\n\n', 0, r"without \[DONE\]"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nda", 0, "closed 3 bytes early"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", 0, "closed within the answer"),
        (OK + b"Content-Length: 90\r\n\r\ndata", 0, "closed 86 bytes early"),
        (OK + b"\r\ndata: {broken\n\n", 0, "not JSON"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", 0, "not HTTP"),
        (b"", 0, "the connection was closed"),
    ],
)
def test_refusals_and_broken_answers_say_what_they_were(answer: bytes, status: int, says: str) -> None:
    """Catches: a cut stream taken for a short answer, a refusal without its reason, a wait that never ends."""
    with pytest.raises(HttpError, match=says) as caught:
        exchange(answer, events)
    assert caught.value.status == status


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "lokal"])
def test_what_is_no_address(url: str) -> None:
    """Catches: a misspelt `local`, or an address without its scheme, that fails late."""
    with pytest.raises(ValueError, match="--serve"):
        Endpoint.of(url)


def test_ports_and_schemes() -> None:
    """Catches: https without TLS, the wrong default port, an IPv6 address without its brackets."""
    assert Endpoint.of("https://host").secure
    assert (Endpoint.of("https://host").port, Endpoint.of("http://host").port) == (443, 80)
    assert Endpoint.of("http://[::1]:8000").host == "::1"
