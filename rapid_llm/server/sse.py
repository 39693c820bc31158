"""Answers that come piece by piece (server-sent events), and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rapid_llm.engine.clock import now

from .errors import ApiError, dump

T = TypeVar("T")

SEND_S: Final = 60.0
"""A client that takes nothing for so long is given up."""

_log = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], *signs: Coroutine[Any, Any, None]) -> T:
    """The result of `work`, which is cancelled, with `ClientGoneError`, if the client leaves first.

    The body must have been read: what `receive` has to say then is only that. signs: of another kind that it is gone.
    """
    task = asyncio.ensure_future(work)
    gone = [asyncio.ensure_future(sign) for sign in (_until_gone(receive), *signs)]
    try:
        await asyncio.wait({task, *gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, *gone):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError, ClientGoneError, ApiError):
                await one


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Each value of `events` as one event in JSON, then `[DONE]`; an error in between becomes an event of its own.

    close: called once, when nothing more is sent, whatever the reason.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Any], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._sending: float | None = None
        """Since when the last event has been waiting for the client to take it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_gone(receive, self._pump(send), self._until_stalled())
        except ClientGoneError:
            _log.info("the client of a stream has left or does not read")
        finally:
            self._close()

    async def _until_stalled(self) -> None:
        """Looks now and then, which costs less than a timer for each event."""
        while self._sending is None or now() - self._sending < SEND_S:
            await asyncio.sleep(SEND_S / 4)

    async def _pump(self, send: Send) -> None:
        async def emit(data: bytes) -> None:
            self._sending = now()
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
            self._sending = None

        try:
            async for event in self._events:
                await emit(dump(event))
        except ApiError as error:
            await emit(dump(error.json()))
        except Exception:
            _log.exception("a stream failed")
            await emit(dump(ApiError(500, "the server failed; its log says how", code="internal_error").json()))
        await emit(b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
