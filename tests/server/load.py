"""Clients of every kind at once: patient ones, ones that leave, hostile ones.

Each request that the server accepted must come to an end that says so; each hostile one must be refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from typing import Any

LEAVES, HOSTILE = 0.2, 0.1
"""Shares of requests whose client leaves early, and of hostile ones."""

PATIENCE = 120.0
"""Seconds after which an answer that does not come counts as lost."""

BODIES: list[tuple[int, Any]] = [
    (400, b"{"),
    (400, b'{"prompt": "\\ud83d"}'),
    (400, b'{"prompt": "\xff"}'),
    (400, b"[" * 5000),
    (422, b"[]"),
    (422, {"prompt": 5}),
    (422, {"prompt": "a", "max_tokens": "many"}),
    (422, {"prompt": "a", "stream": "yes"}),
    (400, {"prompt": ""}),
    (400, {"prompt": [-1, 10**6]}),
    (400, {"prompt": "a", "n": 10**9}),
    (400, {"prompt": "a", "logit_bias": {"10000000": 1}}),
    (400, {"prompt": "a", "best_of": 5}),
    (400, {"prompt": "a", "nonsense": 1}),
    (404, {"prompt": "a", "model": "x"}),
    (400, {"prompt": "word " * 12_000, "max_tokens": 1}),
]
"""Status that must come, and the body that it must come for."""


class LoadError(AssertionError):
    """The server did what it must not do."""


class Load:
    """seed: of all that is drawn. longest: tokens of an answer. flood: bytes of the body that is too long."""

    def __init__(self, port: int, *, seed: int = 0, longest: int = 40, flood: int = 100_000_000) -> None:
        self.counts: Counter[str] = Counter()
        self._port = port
        self._seed = seed
        self._longest = longest
        self._flood = flood
        self._end = 0.0

    def run(self, clients: int, seconds: float) -> None:
        """Raises `LoadError`, or what a client met, once all have ended."""
        asyncio.run(self._run(clients, seconds))

    async def _run(self, clients: int, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._client(random.Random(f"{self._seed} {number}")))

    async def _client(self, draw: random.Random) -> None:
        while time.monotonic() < self._end:
            async with asyncio.timeout(PATIENCE):
                kind = draw.random()
                if kind < LEAVES:
                    await self._leave(draw)
                elif kind < LEAVES + HOSTILE:
                    await self._attack(draw)
                elif kind < 0.9:
                    await self._ask(draw)
                else:
                    await self._embed(draw)

    def _asked(self, draw: random.Random) -> tuple[str, dict[str, Any]]:
        words = " ".join(draw.choices(["red", "green", "blue", "one", "two", "three"], k=draw.randrange(1, 12)))
        fields: dict[str, Any] = {
            "max_tokens": draw.randrange(1, self._longest),
            "n": draw.choice((1, 1, 1, 2, 3)),
            "temperature": draw.choice((0, 0.7, 1.2)),
            "seed": draw.choice((None, 1, 2)),
            "stop": draw.choice((None, None, "e", ["ab", "."])),
            "stream": draw.random() < 0.6,
            "ignore_eos": draw.random() < 0.5,
        }
        if draw.random() < 0.4:
            return "/v1/chat/completions", {**fields, "messages": [{"role": "user", "content": words}]}
        return "/v1/completions", {**fields, "prompt": words, "logprobs": draw.choice((None, None, 2))}

    async def _ask(self, draw: random.Random) -> None:
        path, fields = self._asked(draw)
        status, body = await self._exchange("POST", path, json.dumps(fields).encode())
        if status == 429:
            self.counts["put off"] += 1
            await asyncio.sleep(draw.random() * 0.2)
        elif status != 200:
            raise LoadError(f"{path} {fields}: {status} {body[:500]!r}")
        elif fields["stream"]:
            ends = body.count(b'"finish_reason":"')
            if not body.endswith(b"data: [DONE]\n\n") or ends != fields["n"] or b'"error":' in body:
                raise LoadError(f"{path} {fields}: the stream ends with {body[-500:]!r}")
            self.counts["streams"] += 1
        else:
            choices = json.loads(body)["choices"]
            if len(choices) != fields["n"] or not all(choice["finish_reason"] for choice in choices):
                raise LoadError(f"{path} {fields}: {body[:500]!r}")
            self.counts["answers"] += 1

    async def _embed(self, draw: random.Random) -> None:
        fields = {"input": ["word " * draw.randrange(1, 20) for _ in range(draw.randrange(1, 4))]}
        status, body = await self._exchange("POST", "/v1/embeddings", json.dumps(fields).encode())
        if status not in (200, 429):
            raise LoadError(f"embeddings: {status} {body[:500]!r}")
        self.counts["embeddings" if status == 200 else "put off"] += 1

    async def _attack(self, draw: random.Random) -> None:
        if draw.random() < 0.03:
            await self._overflow()
            return
        wanted, body = draw.choice(BODIES)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = await self._exchange("POST", "/v1/completions", data)
        if status not in (wanted, 429):
            raise LoadError(f"{data[:200]!r}: {status}, not {wanted}: {answer[:300]!r}")
        self.counts["refused"] += 1

    async def _overflow(self) -> None:
        """A body that is far too long, sent for as long as the server takes it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {self._flood}\r\n\r\n".encode())
            answer = asyncio.ensure_future(reader.readuntil(b"\r\n"))
            left = self._flood
            with contextlib.suppress(ConnectionError):
                while left and not writer.is_closing():
                    writer.write(b" " * min(left, 1 << 18))
                    left -= min(left, 1 << 18)
                    await writer.drain()
            line = await answer
            if b" 413 " not in line:
                raise LoadError(f"{self._flood} bytes: {line!r}")
            self.counts["floods"] += 1
        finally:
            writer.transport.abort()

    async def _leave(self, draw: random.Random) -> None:
        path, fields = self._asked(draw)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            self._send(writer, "POST", path, json.dumps(fields).encode())
            if draw.random() < 0.5:
                await asyncio.sleep(draw.random() * 0.3)
            else:
                await reader.read(draw.randrange(1, 2000))
            self.counts["left"] += 1
        finally:
            if draw.random() < 0.5:
                writer.transport.abort()
            else:
                writer.close()

    async def _exchange(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            self._send(writer, method, path, body)
            head, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            return status, _unchunked(rest) if b"transfer-encoding: chunked" in head.lower() else rest
        finally:
            writer.close()

    def _send(self, writer: asyncio.StreamWriter, method: str, path: str, body: bytes) -> None:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def _unchunked(data: bytes) -> bytes:
    found = bytearray()
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        found += data[:length]
        data = data[length + 2 :]
    return bytes(found)


def figures(text: str) -> dict[str, float]:
    """The figures without labels of what /metrics said."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#") and "{" not in line]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
