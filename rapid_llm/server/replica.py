"""One of several replicas: the application of a single server, called without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rapid_llm.engine.stats import measured_bandwidth
from rapid_llm.platform import default_threads

from .app import create_app
from .front import Call, Start
from .report import Report
from .served import Served
from .service import ServerOptions, Service

if TYPE_CHECKING:
    from rapid_llm.engine.llm import LLM

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What every replica is. model: as `LLM` takes it; None where it is random weights of `shape`. engine: options of
    the engine. names: that requests call the model by."""

    model: str | None
    shape: str | None
    engine: Mapping[str, Any]
    names: tuple[str, ...]
    options: ServerOptions

    def make(self) -> LLM:
        """The engine, ready to serve."""
        from rapid_llm.engine.llm import LLM
        from rapid_llm.engine.random_llm import random_llm

        if self.shape is not None:
            llm = random_llm(self.shape, **self.engine)
        else:
            llm = LLM(**self.engine) if self.model is None else LLM(self.model, **self.engine)
        report = llm.prepare()
        if not report.ok:
            _log.warning("not everything could be prepared, and slower rows may run:\n%s", report)
        return llm

    def placed(self, count: int) -> ReplicaSpec:
        """The same with the share of the CPU's threads that one of `count` replicas has, unless it states its own."""
        if self.gpus or self.engine.get("threads") is not None:
            return self
        ranks = self.engine.get("tensor_parallel") or 1
        return replace(self, engine={**self.engine, "threads": max(default_threads() // (count * ranks), 1)})

    @property
    def gpus(self) -> int:
        """How many one replica takes."""
        import torch

        device = str(self.engine.get("device") or "auto")
        cuda = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
        return int(self.engine.get("tensor_parallel") or 1) if cuda else 0


class ReplicaServer:
    """One replica: the application of a single server, called without a socket."""

    def __init__(self, spec: ReplicaSpec) -> None:
        llm = spec.make()
        self._service = Service(Served(llm, spec.names), spec.options)
        self._app = create_app(self._service, Report(self._service, measured_bandwidth(llm.device)))
        self._started = False

    async def trouble(self) -> str | None:
        """See `front.Replica`."""
        self._start()
        return self._service.engine.trouble()

    async def check_health(self) -> None:
        """For Ray, which starts a replica anew where this raises again and again."""
        if self._started and (trouble := self._service.engine.trouble()) is not None:
            raise RuntimeError(trouble)

    async def answer(self, call: Call) -> AsyncGenerator[Start | bytes, None]:
        """See `front.Replica`."""
        self._start()
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        gone, asked = asyncio.Event(), False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": call.body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.put_nowait(message)

        async def run() -> None:
            try:
                await self._app(_scope(call), receive, send)
            finally:
                sent.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    headers = ((n.decode("latin-1"), v.decode("latin-1")) for n, v in message.get("headers", ()))
                    yield Start(message["status"], tuple(headers))
                elif message.get("body"):
                    yield bytes(message["body"])
            await task
        finally:
            gone.set()
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def acknowledged(self, call: Call) -> AsyncGenerator[Start | bytes | None, None]:
        """`answer`, behind a None that says at once that the request is here."""
        yield None
        async with contextlib.aclosing(self.answer(call)) as parts:
            async for part in parts:
                yield part

    def _start(self) -> None:
        """In the loop that serves, with the first call."""
        if not self._started:
            self._started = True
            self._service.start()


def _scope(call: Call) -> Mapping[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query.encode("latin-1"),
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in call.headers],
        "client": None,
        "server": None,
    }
