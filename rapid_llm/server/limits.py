"""What a request may cost before it is known to be worth anything: its body, its key, its place in the line."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from starlette.requests import ClientDisconnect, Request

from .errors import ApiError

BODY_S: Final = 30.0
"""Seconds that a client may take to send a body."""

MAX_DEPTH: Final = 64
"""Of lists and objects within each other."""


async def read_json(request: Request, max_bytes: int) -> Any:
    """The body as JSON.

    Raises `ApiError`: 413 before a body that is too long is read, or once it turns out to be; 408 for one that takes
    too long; 400 for what is no JSON, no UTF-8, holds half a character (a lone surrogate), or is nested too deeply.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        _too_long(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    _too_long(max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:g} s", code="body_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was whole") from None
    return parse(bytes(body))


def parse(body: bytes) -> Any:
    """JSON, strictly. Errors as in `read_json`."""
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant)
    except RecursionError:
        _too_deep()
    except ValueError as error:
        what = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else "is not JSON"
        raise ApiError(400, f"the body {what}: {error}", code="invalid_json") from None
    _check(value, surrogates=b"\\u" in body)
    return value


def _check(value: Any, surrogates: bool) -> None:
    """Walk the value once, without recursion."""
    pending: list[tuple[Any, int, str]] = [(value, 0, "")]
    while pending:
        item, depth, where = pending.pop()
        if depth > MAX_DEPTH:
            _too_deep()
        if isinstance(item, dict):
            pairs = [(key, entry) for key, entry in item.items()]
            if surrogates:
                for key in item:
                    _check_text(key, where or "the body")
        elif isinstance(item, list):
            pairs = list(enumerate(item)) if surrogates else [(i, v) for i, v in enumerate(item) if type(v) in _NESTED]
        else:
            if isinstance(item, str):
                _check_text(item, where or "the body")
            continue
        for key, entry in pairs:
            if type(entry) in _NESTED or (surrogates and type(entry) is str):
                pending.append((entry, depth + 1, f"{where}.{key}" if where else str(key)))


_NESTED: Final = (dict, list)


def _check_text(text: str, where: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            400,
            f"{where.encode(errors='replace').decode()} holds a lone surrogate U+{ord(text[error.start]):04X} at "
            f"position {error.start}, which is half of a character; send the whole one",
            param=where.partition(".")[0].encode(errors="replace").decode(),
            code="invalid_text",
        ) from None


def _too_long(max_bytes: int) -> NoReturn:
    raise ApiError(
        413,
        f"the body is longer than {max_bytes} bytes; send less, or start the server with a higher --max-body-bytes",
        code="body_too_long",
    )


def _too_deep() -> NoReturn:
    raise ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep", code="invalid_json")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number that JSON has")


class Keys:
    """The keys that open the server; none means that it is open."""

    def __init__(self, keys: Sequence[str]) -> None:
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in keys):
            raise ValueError("api_key: a key needs at least one character, and printable ASCII without spaces only")
        self._keys = [key.encode() for key in keys]

    def check(self, authorization: str | None) -> None:
        """Raise `ApiError` (401) unless the header holds `Bearer` and one of the keys."""
        if not self._keys:
            return
        scheme, _, given = (authorization or "").partition(" ")
        # every key is compared, in constant time: how long a refusal takes tells nothing
        matches = [hmac.compare_digest(given.strip().encode(errors="replace"), key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "this server wants a key: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


class Slots:
    """How many answers may be in the making or wait for it: `n` of each prompt. Belongs to the event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.closed: str | None = None
        """Why no more is taken."""

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Hold `count` places. Raises `ApiError`: 400 for more than exist, 429 when too few are free, 503 closed."""
        if self.closed is not None:
            raise ApiError(503, self.closed, code="shutting_down", headers={"Retry-After": "5"})
        if count > self.limit:
            raise ApiError(
                400,
                f"the request asks for {count} answers (n times prompts) and the server takes {self.limit} at a time: "
                "ask for fewer, or start the server with a higher --max-concurrent-requests",
                param="n",
                code="too_many_answers",
            )
        if self.used + count > self.limit:
            raise ApiError(
                429,
                f"{self.used} of {self.limit} answers are being made and {count} more are asked for: try later, "
                "or start the server with a higher --max-concurrent-requests",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
        self.used += count
        try:
            yield
        finally:
            self.used -= count
