"""The step loop, shared by every thread that uses an engine.

There is no engine thread: whoever waits for a job drives the loop, one thread at a time, and each step serves
everyone's requests. A thread that waits while another drives sleeps, and is woken after each step to see whether its
job is done. New and aborted requests go through an inbox that needs no turn, so a thread never has to win one to be
heard.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import NamedTuple

from .clock import now
from .errors import EngineError
from .job import Job
from .request import FinishReason, Request
from .runner import Flight, Runner
from .sampler import Choice
from .scheduler import Chunk, Scheduler


@dataclass(slots=True)
class StepTotals:
    """Steps, the tokens that they computed, and their seconds, over an engine's life; prefill apart from decode.

    A step in which every request computes one token, and maybe guesses behind it, is a decode step, any other one a
    prefill step. The tokens of a decode step are those that came out of it. guessed, accepted: tokens of guesses, and
    those of them that were right.
    """

    prefill_steps: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    guessed: int = 0
    accepted: int = 0

    def add(self, tokens: int, decode: bool, seconds: float) -> None:
        if decode:
            self.decode_steps += 1
            self.decode_tokens += tokens
            self.decode_seconds += seconds
        else:
            self.prefill_steps += 1
            self.prefill_tokens += tokens
            self.prefill_seconds += seconds


class StepFigures(NamedTuple):
    """What `StepTotals.add` takes."""

    tokens: int
    decode: bool
    seconds: float


StepHook = Callable[[Sequence[Chunk], Callable[[], StepFigures]], object]
"""Called in place of a step with its chunks and a function that runs it and returns its figures (see `stats`)."""


class Engine:
    """Runs jobs to their end. Safe to use from several threads."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.totals = StepTotals()
        self.step_hook: StepHook | None = None
        self.runner = runner
        self._inbox: deque[tuple[str, Job]] = deque()
        self._jobs: dict[Request, Job] = {}
        self._unfinished: dict[str, list[int]] = {}
        """Request ids, and how many samples of each are still to end."""
        self._flight: Flight | None = None
        """The step that was enqueued behind the last one that was completed."""
        self._landed = 0.0
        self._turn = threading.Condition()
        self._driver: int | None = None

    def submit(self, job: Job) -> None:
        """Hand over a job whose requests are known to fit. It runs once somebody drives.

        Raises `ValueError` where the engine has a request of that id, which goes on as if nothing had happened.
        """
        unfinished = [len(job.requests)]
        if self._unfinished.setdefault(job.request_id, unfinished) is not unfinished:
            raise ValueError(f"request_id={job.request_id!r} is in the engine already: use another one")
        self._inbox.append(("add", job))

    def drive(self, until: Callable[[], bool]) -> None:
        """Run steps, or wait while another thread does, until `until()`.

        An exception inside a step ends every request in the engine with finish_reason `error` and is raised here.
        """
        me = threading.get_ident()
        while True:
            try:  # owning the turn is told by `_driver` alone, so that an interrupt at any point gives it up
                with self._turn:
                    while self._driver is not None and not until():
                        self._turn.wait()
                    if until():
                        return
                    self._driver = me
                self._take_inbox()
                if not until():
                    self._step()
            except BaseException as error:
                if self._driver == me:
                    self._fail(error)
                raise
            finally:
                self._give_up_turn(me)

    def abort(self, jobs: Sequence[Job]) -> None:
        """End what is unfinished of the jobs and free its cache: now, or before the next step if one is running.

        Never waits, because a stream that is garbage-collected comes here, and that can happen within a step.
        """
        for job in jobs:
            if not job.finished:
                self._inbox.append(("abort", job))
        me = threading.get_ident()
        with self._turn:
            if self._driver is not None or not self._inbox:
                return
            self._driver = me
        try:
            self._take_inbox()
        finally:
            self._give_up_turn(me)

    def check(self) -> None:
        """Raise `RuntimeError` if a page of the cache is lost or miscounted. For tests; not while a step runs."""
        self.scheduler.pool.check(request.pages for request in self.scheduler.requests())
        if self.scheduler.prefix is not None:
            self.scheduler.prefix.check()

    @property
    def unfinished(self) -> int:
        """Requests in the engine."""
        return len(self._jobs)

    def _give_up_turn(self, me: int) -> None:
        if self._driver == me:
            with self._turn:
                self._driver = None
                self._turn.notify_all()

    def _take_inbox(self) -> None:
        while self._inbox:
            what, job = self._inbox.popleft()
            if what == "add":
                for request in job.requests:
                    self.scheduler.add(request)
                    self._jobs[request] = job
            else:
                for request in job.requests:
                    if not request.finished:
                        self._finish(request, "abort")
                if not self._jobs:
                    self.scheduler.check_idle()

    def _step(self) -> None:
        if self._flight is not None:
            self._complete(self._flight, self._landed)
            return
        chunks = self.scheduler.schedule()
        if not chunks:
            raise EngineError("no request can go on: the scheduler's bookkeeping is broken")
        if self.step_hook is None:
            self._compute(chunks)
        else:
            self.step_hook(chunks, lambda: self._compute(chunks))

    def _compute(self, chunks: Sequence[Chunk]) -> StepFigures:
        started = now()
        return self._complete(self.runner.launch(chunks), started)

    def _complete(self, flight: Flight, started: float) -> StepFigures:
        """Wait for a step, having enqueued the one behind it where that is known already, and hand out its results."""
        self._flight = self._launch_behind(flight)
        done = flight.wait()
        self._landed = finished = now()
        for request, rows in done.scores:
            self._jobs[request].take_prompt_logprobs(request.scored, rows)
            request.scored += len(rows)
        choices, kept, chunks = iter(done.choices), 0, flight.chunks
        for chunk in chunks:
            if chunk.request.finished:  # while its step was on its way: by an abort, or by the token before
                next(choices)
                continue
            if chunk.draft:
                kept += self._verify(chunk, list(islice(choices, chunk.size)), finished)
            else:
                kept += chunk.size
                self.scheduler.commit(chunk)
                if chunk.samples:
                    self._jobs[chunk.request].take(chunk.request, next(choices), finished)
            if chunk.request.finished:
                self._finish(chunk.request)
        if not self._jobs:
            self.scheduler.check_idle()
        figures = StepFigures(kept, all(chunk.decodes for chunk in chunks), finished - started)
        if kept:
            self.totals.add(*figures)
        return figures

    def _launch_behind(self, flight: Flight) -> Flight | None:
        """The step behind `flight`, enqueued; None where nobody is to be computed or what it is depends on results.

        What is computed for a request that ends meanwhile is dropped. Its pages may by then be another's, who writes
        them in a later step: the device runs steps in their order.
        """
        if not flight.graphed or self.step_hook is not None or self._inbox:
            return None
        chunks = self.scheduler.ahead(flight.chunks)
        return self.runner.launch_behind(flight, chunks) if chunks else None

    def _verify(self, chunk: Chunk, choices: Sequence[Choice], time: float) -> int:
        """Give a request the choices behind its guesses, up to the first that differs from its guess; how many."""
        request, job, taken = chunk.request, self._jobs[chunk.request], 0
        self.totals.guessed += len(chunk.draft)
        for guess, choice in zip_longest(chunk.draft, choices):
            job.take(request, choice, time)
            taken += 1
            self.totals.accepted += choice.token == guess
            if request.finished or choice.token != guess:
                break
        self.scheduler.commit(chunk, taken)
        return taken

    def _finish(self, request: Request, reason: FinishReason | None = None) -> None:
        self.scheduler.finish(request, reason)
        job = self._jobs.pop(request)
        self._count_out(job)
        job.close(request, now())

    def _count_out(self, job: Job) -> None:
        """One sample of the job has ended; with the last one its id is free, before anybody can see that it ended."""
        unfinished = self._unfinished[job.request_id]
        unfinished[0] -= 1
        if not unfinished[0]:
            del self._unfinished[job.request_id]

    def _fail(self, error: BaseException) -> None:
        """End everything. The scheduler starts afresh: a step that broke off may have left it in any state."""
        failed, self._jobs = self._jobs, {}
        self._flight = None
        self.scheduler.reset()
        for request, job in failed.items():
            request.finish_reason, request.stop_reason = "error", f"{type(error).__name__}: {error}"
            job.failure = error
            self._count_out(job)
            job.close(request, now())
