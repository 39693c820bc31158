"""What all routes share: the model, the engine's thread, the limits, the counters."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from .async_engine import AsyncEngine, Ticket
from .errors import ApiError, dump, refused
from .limits import Keys, Slots, read_json
from .metrics import Metrics
from .served import Served
from .sse import EventStream, unless_gone
from .tools import FORMATS, detect

if TYPE_CHECKING:
    from rapid_llm.engine.job import Job

T = TypeVar("T")

LEAST_BODY_BYTES: Final = 1 << 20
BYTES_PER_TOKEN: Final = 16
"""A body of default length holds a prompt as long as the context, spelled out with room to spare."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server runs, beside its engine; the defaults are the product's.

    api_keys: any of them opens the server; none leaves it open. max_concurrent_requests: answers (`n` of each prompt)
    that may be in the making or wait; more are refused with 429. max_body_bytes: of a request; None is
    `LEAST_BODY_BYTES`, or `BYTES_PER_TOKEN` for each token of the context if that is more. shutdown_timeout: seconds
    that running answers are given at the end. stall_timeout: seconds without a step after which /health says 503.
    tool_format: how the model writes calls of functions, one of `tools.FORMATS`; None finds out from its template.
    """

    api_keys: Sequence[str] = ()
    max_concurrent_requests: int = 256
    max_body_bytes: int | None = None
    shutdown_timeout: float = 30.0
    stall_timeout: float = 60.0
    tool_format: str | None = None

    def __post_init__(self) -> None:
        Keys(self.api_keys)
        for name, least in (("max_concurrent_requests", 1), ("max_body_bytes", 1024)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{name}={value!r}: use an integer of {least} or more")
        for name in ("shutdown_timeout", "stall_timeout"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name}={value!r}: use a number of seconds above 0")
        if self.tool_format is not None and self.tool_format not in FORMATS:
            raise ValueError(f"tool_format={self.tool_format!r} is not known; use one of {', '.join(FORMATS)}")


class Service:
    """Made in any thread; `start` it in the event loop that serves, and `stop` it there."""

    def __init__(self, served: Served, options: ServerOptions) -> None:
        self.served = served
        self.started = int(time.time())
        self.options = options
        self.keys = Keys(options.api_keys)
        self.slots = Slots(options.max_concurrent_requests)
        self.metrics = Metrics(served, self)
        self.engine = AsyncEngine(served.engine, stall_s=options.stall_timeout, watcher=self.metrics)
        self.tool_format = options.tool_format or detect(served.template_source)
        self.max_body_bytes = options.max_body_bytes or max(LEAST_BODY_BYTES, BYTES_PER_TOKEN * served.max_model_len)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="rapid-llm text")

    def start(self) -> None:
        self.engine.start()

    def stop(self) -> None:
        self.engine.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def body(self, request: Request) -> Any:
        """The request's JSON. Raises `ApiError`."""
        return await read_json(request, self.max_body_bytes)

    async def in_pool(self, function: Callable[[], T], param: str | None = None) -> T:
        """The result of a function that may take long. What it says of values becomes an `ApiError` about `param`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function)
        except (ValueError, TypeError) as error:
            raise refused(error, param) from error

    def require_engine(self) -> None:
        """Raise `ApiError` (503) where the engine cannot answer."""
        if (trouble := self.engine.trouble()) is not None:
            raise ApiError(503, trouble, code="engine_unavailable", headers={"Retry-After": "5"})

    async def answer(
        self,
        request: Request,
        count: int,
        make: Callable[[], list[Job]],
        *,
        whole: Callable[[Sequence[Job]], Any],
        events: Callable[[Ticket], AsyncIterator[Any]] | None,
        param: str,
        user: str | None,
    ) -> Response:
        """Run what `make` makes. count: how many answers that is. events: those of a stream; None answers at once.

        whole: the body of an answer at once. param: the field that `make` complains of. user: whom the log names.
        """
        self.require_engine()
        with ExitStack() as stack:
            stack.enter_context(self.slots.take(count))
            jobs = await self.in_pool(make, param)
            ticket = self.engine.submit(jobs)
            stack.callback(_tell, request.url.path, jobs, user)
            stack.callback(self.engine.cancel, ticket)
            if events is not None:
                close = stack.pop_all().close
                return EventStream(events(ticket), close)
            await unless_gone(request.receive, ticket.wait())
            body = await self.in_pool(lambda: dump(whole(jobs)))
            return Response(body, media_type="application/json")


def _tell(path: str, jobs: Sequence[Job], user: str | None) -> None:
    """A line of the log for a request that is over."""
    if _log.isEnabledFor(logging.INFO):
        prompt = sum(job.metrics.prompt_tokens for job in jobs)
        answer = sum(job.metrics.output_tokens for job in jobs)
        reasons = ", ".join(request.finish_reason or "ended early" for job in jobs for request in job.requests[:4])
        who = "" if user is None else f" of {user!r:.64}"
        _log.info("%s%s: %d prompt tokens, %d generated: %s", path, who, prompt, answer, reasons)
