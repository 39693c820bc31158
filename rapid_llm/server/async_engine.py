"""One thread that drives the engine, and the door through which an event loop uses it.

Only that thread touches the engine. What others want of it (take a job, end one, run a function between two steps) goes
into a queue that it empties before each step; what it has for them crosses back once a step, as one call into the loop.
So a slow reader, a burst of requests or a long prompt costs the loop nothing, and nothing in the loop costs a step.

A step that fails ends the requests that were in the engine, each with that error, and the thread goes on. If the thread
itself ends, by whatever it was, every request ends with an error and `trouble` says so from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from rapid_llm.engine.clock import now
from rapid_llm.engine.errors import EngineEndedError

from .errors import ApiError

if TYPE_CHECKING:
    from rapid_llm.engine.core import Engine
    from rapid_llm.engine.job import Job
    from rapid_llm.engine.outputs import TextDelta

T = TypeVar("T")

STOP_S: Final = 10.0
"""So long may the last step take; then the process ends without it."""

FAILURES_IN_A_ROW: Final = 3
"""So many failed steps without a good one between them are a broken engine, not a bad request."""

_log = logging.getLogger(__name__)


class Chore(Protocol):
    """Work that shares the thread with the engine's steps, a piece at a time."""

    def work(self, beat: Callable[[], None]) -> bool:
        """Do one piece; whether that was the last one. An exception ends the chore and is given to who waits.

        beat: to be called now and then where a piece takes long.
        """
        ...


class Watcher(Protocol):
    """What is told of each request's progress, on the engine's thread (see `metrics`)."""

    def stepped(self, jobs: Sequence[Job], time: float) -> None: ...


def _nothing(*_: object) -> None:
    pass


class News(NamedTuple):
    """deltas: of job number `number`. finished: whether it has ended."""

    number: int
    deltas: list[TextDelta]
    finished: bool


class Ticket:
    """What one HTTP request waits for: its jobs, and the news of them. Belongs to the event loop."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = list(jobs)
        self._open = len(self.jobs)
        self._news: asyncio.Queue[News | ApiError] = asyncio.Queue()

    @property
    def finished(self) -> bool:
        return self._open == 0

    def put(self, news: News) -> None:
        """Called in the loop."""
        self._news.put_nowait(news)

    def fail(self, error: ApiError) -> None:
        """There will be no more news. Called in the loop."""
        self._news.put_nowait(error)

    async def deltas(self) -> AsyncIterator[tuple[int, TextDelta]]:
        """(number of the job, delta) as they come, until every job has ended.

        Raises `ApiError` where a step or the engine failed.
        """
        while self._open:
            news = await self._news.get()
            if isinstance(news, ApiError):
                self._open = 0
                raise news
            if news.finished and (failure := self.jobs[news.number].failure) is not None:
                self._open = 0
                raise ApiError(500, f"the step failed: {_shown(failure)}", code="step_failed")
            for delta in news.deltas:
                yield news.number, delta
            self._open -= news.finished

    async def wait(self) -> None:
        """Until every job has ended. Errors as in `deltas`."""
        async for _ in self.deltas():
            pass


class _Command(NamedTuple):
    """run: on the engine's thread. fail: told why it will not run."""

    run: Callable[[], None]
    fail: Callable[[ApiError], None]


class AsyncEngine:
    """The engine's thread. Made and used in one event loop; `start` it there.

    stall_s: so long may a step take before `trouble` calls it stuck. watcher: told of every step.
    """

    def __init__(self, engine: Engine, *, stall_s: float, watcher: Watcher) -> None:
        self._engine = engine
        self._stall_s = stall_s
        self._watcher = watcher
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._idle = True
        self._stamp = now()
        self._stopping = False
        self._death: str | None = None
        # From here on, the thread's own.
        self._tickets: dict[Ticket, set[int]] = {}
        self._chores: deque[tuple[Chore, asyncio.Future[None]]] = deque()
        self._failures = 0
        self.step_failures = 0
        self._thread = threading.Thread(target=self._run, name="rapid-llm engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def finish(self) -> None:
        """Let the thread end after the step that runs; what is unfinished ends with an error. Does not wait."""
        self._stopping = True
        with contextlib.suppress(ApiError):  # it has ended by itself
            self._post(_nothing)

    def stop(self) -> None:
        """As `finish`, and wait for it."""
        self.finish()
        if self._thread.is_alive():
            self._thread.join(timeout=STOP_S)

    # ---- for the event loop ------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job]) -> Ticket:
        """Hand jobs over. Raises `ApiError` (503) if the engine's thread has ended."""
        ticket = Ticket(jobs)
        self._post(lambda: self._add(ticket), lambda error: self._in_loop(partial(ticket.fail, error)))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End what is unfinished of a ticket, before the next step. Never raises: it is called on the way out."""
        if not ticket.finished:
            with contextlib.suppress(ApiError):  # an engine that has ended runs nothing
                self._post(lambda: self._abort(ticket))

    async def call(self, function: Callable[[], T]) -> T:
        """The function's result, run on the engine's thread between two steps."""
        future: asyncio.Future[T] = self._running_loop().create_future()

        def run() -> None:
            try:
                result = function()
            except Exception as error:
                self._resolve(future, None, error)
            else:
                self._resolve(future, result, None)

        self._post(run, lambda error: self._resolve(future, None, error))
        return await future

    async def do(self, chore: Chore) -> None:
        """Until the chore is done, piece by piece between steps; giving up waiting takes it out."""
        future: asyncio.Future[None] = self._running_loop().create_future()
        entry = (chore, future)
        self._post(lambda: self._chores.append(entry), lambda error: self._resolve(future, None, error))
        await future

    def trouble(self) -> str | None:
        """Why the engine cannot be trusted to answer; None while it can. Costs nothing and never waits."""
        if self._death is not None:
            return self._death
        if not self._thread.is_alive():
            return "the engine's thread is not running"
        since = now() - self._stamp
        if not self._idle and since > self._stall_s:
            return f"requests wait and no step has finished for {since:.1f} s"
        if self._failures >= FAILURES_IN_A_ROW:
            return f"the last {self._failures} steps failed"
        return None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("the engine's thread was not started")
        return self._loop

    def _post(self, run: Callable[[], None], fail: Callable[[ApiError], None] = _nothing) -> None:
        with self._wake:
            if self._death is not None:
                raise ApiError(503, self._death, code="engine_dead")
            if self._idle:
                self._idle = False
                self._stamp = now()
            self._commands.append(_Command(run, fail))
            self._wake.notify()

    # ---- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if self._chores:
                    self._work()
                if self._tickets:
                    self._step()
                self._beat()
            for ticket in self._tickets:
                self._engine.abort(ticket.jobs)
            self._end("the server is shutting down")
        except BaseException as error:
            # Whatever ends the thread must be seen: by whoever waits, by /health, and in the log.
            _log.critical("the engine's thread has ended", exc_info=True)
            self._end(f"the engine's thread has ended: {_shown(error)}")

    def _beat(self) -> None:
        self._stamp = now()

    def _take_commands(self) -> None:
        with self._wake:
            while not (self._commands or self._tickets or self._chores):
                self._idle = True
                self._wake.wait()
        while self._commands:
            self._commands.popleft().run()

    def _add(self, ticket: Ticket) -> None:
        self._tickets[ticket] = set(range(len(ticket.jobs)))
        for job in ticket.jobs:
            self._engine.submit(job)

    def _abort(self, ticket: Ticket) -> None:
        if ticket in self._tickets:
            self._engine.abort(ticket.jobs)
            self._watcher.stepped(ticket.jobs, now())
            self._publish()

    def _step(self) -> None:
        jobs = [ticket.jobs[index] for ticket, unfinished in self._tickets.items() for index in unfinished]
        before, ended = _steps(self._engine), None
        try:
            self._engine.drive(lambda: _steps(self._engine) != before or all(job.finished for job in jobs))
            self._failures = 0
        except Exception as error:
            _log.exception("a step failed; every request that was in the engine ends with this error")
            self._failures += 1
            self.step_failures += 1
            ended = error if isinstance(error, EngineEndedError) else None
        self._watcher.stepped(jobs, now())
        self._publish()
        if ended is not None:  # no later request can do better
            raise ended

    def _publish(self) -> None:
        """Send what is new to the loop, in one call."""
        found: list[tuple[Ticket, News]] = []
        for ticket, unfinished in list(self._tickets.items()):
            for index in sorted(unfinished):
                job = ticket.jobs[index]
                finished = job.finished  # read first: once it is true, every delta is in
                deltas = job.deltas()
                if finished:
                    unfinished.discard(index)
                if finished or deltas:
                    found.append((ticket, News(index, deltas, finished)))
            if not unfinished:
                del self._tickets[ticket]
        if found:
            self._in_loop(lambda: _deliver(found))

    def _work(self) -> None:
        chore, future = self._chores[0]
        if future.cancelled():
            self._chores.popleft()
            return
        try:
            done = chore.work(self._beat)
        except Exception as error:
            self._chores.popleft()
            self._resolve(future, None, error)
            return
        if done:
            self._chores.popleft()
            self._resolve(future, None, None)
        else:
            self._chores.rotate(-1)

    def _end(self, reason: str) -> None:
        """Refuse what comes, and answer whoever waits."""
        error = ApiError(503, reason, code="engine_dead")
        with self._wake:
            self._death = reason
            late = list(self._commands)
            self._commands.clear()
        for command in late:
            command.fail(error)
        for ticket in self._tickets:
            self._in_loop(partial(ticket.fail, error))
        for _, future in self._chores:
            self._resolve(future, None, error)

    def _resolve(self, future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._in_loop(settle)

    def _in_loop(self, function: Callable[[], None]) -> None:
        loop = self._running_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(function)


def _deliver(found: Sequence[tuple[Ticket, News]]) -> None:
    for ticket, news in found:
        ticket.put(news)


def _steps(engine: Engine) -> int:
    return engine.totals.prefill_steps + engine.totals.decode_steps


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
