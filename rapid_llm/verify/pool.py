"""Work in several processes, none of which can take the others or the caller down.

A worker that dies, hangs or says that its device is no longer usable costs the task that it had, and is replaced. The
results come in the order in which they are done. Workers are forked from a process that has imported what they do and
done nothing else (`forkserver`): so the caller may hold CUDA and run threads, and a worker is there at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Final, Generic, TypeVar

Task = TypeVar("Task")

_FORKS: Final = multiprocessing.get_context("forkserver")
_QUIT: Final = "no more"


@dataclass(frozen=True, slots=True)
class Lost(Generic[Task]):
    """A task that its worker did not finish, and why."""

    task: Task
    why: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """A worker's answer. last: the worker ends after it, as its device is unusable."""

    value: Any
    last: bool = False


@dataclass(slots=True)
class _Worker:
    process: Any
    pipe: Connection
    task: Any = None
    since: float = field(default_factory=time.monotonic)


def run(
    tasks: Sequence[Task],
    work: Callable[[Task], Done],
    start: Callable[[str], None],
    *,
    jobs: int,
    limit_s: float,
) -> Iterator[Any]:
    """Yield the value of `work(task)` or a `Lost` for every task, as they come.

    start: called once in every worker with the name of a file for locks between them. limit_s: a task that takes longer
    is lost. Importing the modules of `work` and `start` must leave CUDA alone: it is done before workers are forked.
    """
    _FORKS.set_forkserver_preload([work.__module__, start.__module__])
    pending = deque(tasks)
    number, lock = tempfile.mkstemp(prefix="rapid-llm-")
    os.close(number)
    workers: list[_Worker] = []
    try:
        while pending or any(w.task is not None for w in workers):
            while pending and len(workers) < jobs and len(workers) < len(pending) + _busy(workers):
                workers.append(_start(work, start, lock))
            for worker in workers:
                if worker.task is None and pending:
                    _give(worker, pending.popleft())
            yield from _collect(workers, limit_s)
    finally:
        for worker in workers:
            _end(worker)
        os.unlink(lock)


def _busy(workers: list[_Worker]) -> int:
    return sum(w.task is not None for w in workers)


def _start(work: Callable[[Any], Done], start: Callable[[str], None], lock: str) -> _Worker:
    ours, theirs = _FORKS.Pipe()
    process = _FORKS.Process(target=_serve, args=(theirs, work, start, lock, dict(os.environ)), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _give(worker: _Worker, task: Any) -> None:
    worker.task, worker.since = task, time.monotonic()
    with contextlib.suppress(OSError):  # it is dead already: `_collect` sees that and counts the task as lost
        worker.pipe.send(task)


def _collect(workers: list[_Worker], limit_s: float) -> Iterator[Any]:
    """Answers, deaths and overruns of one moment; takes workers that are gone out of the list."""
    busy = [w for w in workers if w.task is not None]
    soonest = min(w.since for w in busy) + limit_s - time.monotonic()
    ready = set(wait([w.pipe for w in busy], timeout=max(0.0, min(soonest, 1.0))))
    for worker in busy:
        took = time.monotonic() - worker.since
        gone, result = False, None
        if worker.pipe in ready:
            try:
                done: Done = worker.pipe.recv()
                gone, result = done.last, done.value
            except (EOFError, OSError):
                worker.process.join(5)
                gone, result = True, Lost(worker.task, _death(worker.process.exitcode), took)
        elif took > limit_s:
            gone, result = True, Lost(worker.task, f"it took longer than {limit_s:g} s and was ended", took)
        else:
            continue
        worker.task = None
        if gone:
            workers.remove(worker)
            _end(worker)
        yield result


def _death(status: int | None) -> str:
    if status is None:
        return "its process closed the pipe and did not end"
    if status < 0:
        try:
            return f"its process was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"its process was killed by signal {-status}"
    return f"its process ended with status {status}"


def _end(worker: _Worker) -> None:
    """Let an idle worker leave by itself; end one that is at work."""
    if worker.task is None:
        with contextlib.suppress(OSError):  # gone already
            worker.pipe.send(_QUIT)
        worker.process.join(2)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join(5)
    worker.pipe.close()


def _serve(
    pipe: Connection, work: Callable[[Any], Done], start: Callable[[str], None], lock: str, environment: dict[str, str]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends us
    os.environ.clear()
    os.environ.update(environment)  # the caller's as it is now, not as it was when the first worker was started
    start(lock)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        if task == _QUIT:
            return
        done = work(task)
        pipe.send(done)
        if done.last:
            os._exit(0)  # nothing can be cleaned up on a device that has failed
