"""A server from its start to its end: listens, serves, and on a signal finishes what it has begun.

On SIGTERM or SIGINT nothing new is accepted. Running answers go on for `shutdown_timeout` at most; what is not done
then ends with an error that says so. A second signal ends them at once. The exit status is 0 in each of
these cases.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Generator
from types import FrameType
from typing import TYPE_CHECKING, Final

import uvicorn

from .app import create_app
from .report import Report
from .served import Served
from .service import ServerOptions, Service

if TYPE_CHECKING:
    from rapid_llm.engine.llm import LLM

LAST_S: Final = 5
"""Seconds that connections get to take the last words."""

_log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the port and does not listen yet; port 0 takes any that is free. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
    except BaseException:
        opened.close()
        raise
    return opened


class Server(uvicorn.Server):
    """uvicorn around a service. `run` returns once it has ended well."""

    def __init__(
        self,
        llm: LLM,
        names: list[str],
        options: ServerOptions,
        read_bandwidth: tuple[float, str],
        log_level: str = "info",
    ) -> None:
        self.service = Service(Served(llm, names), options)
        self.report = Report(self.service, read_bandwidth)
        super().__init__(
            uvicorn.Config(
                create_app(self.service, self.report),
                log_level=log_level,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(options.shutdown_timeout) + LAST_S,
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Until a signal, or until `begin_shutdown`."""
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self.service.start()
        try:
            await super().serve(sockets)
        finally:
            await self.report.close()
            self.service.stop()
            if self._draining is not None:
                self._draining.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals end the server, not the process: its exit status tells that all is well."""
        handled = (signal.SIGINT, signal.SIGTERM)
        try:
            before = {number: signal.signal(number, self.handle_exit) for number in handled}
        except ValueError:  # not the main thread, which signals are the affair of
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        del sig, frame
        self._loop.call_soon_threadsafe(self.begin_shutdown)

    def begin_shutdown(self) -> None:
        """Accept nothing more and let running answers finish; called again, end them now. In the loop."""
        if self._draining is None:
            self.service.slots.closed = "the server is shutting down"
            self.should_exit = True
            self._draining = self._loop.create_task(self._drain())
        else:
            self.service.engine.finish()

    async def _drain(self) -> None:
        seconds = self.service.options.shutdown_timeout
        _log.info("shutting down: %d answers may take %g s more", self.service.slots.used, seconds)
        await asyncio.sleep(seconds)
        self.service.engine.finish()
