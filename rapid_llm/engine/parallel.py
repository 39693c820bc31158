"""Tensor parallelism from rank 0: the processes of the other ranks, and steps that all of them make together.

Rank 0 is this process. It alone schedules and samples; before each step it sends every other rank the step's plan
(`plan`), which they carry out (`follower`), so that all make the same exchanges in the same order.

Invariant: nobody waits for a rank that is gone. A rank that ends takes the others with it, and whatever rank 0 does
from then on raises `RankError` with the reason of the first.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, distributed

from rapid_llm.models.decoder import Decoder
from rapid_llm.models.parallel import ParallelError, Ranks

from .agreement import RowChoice, choices, disagreement
from .assembly import Sizes
from .errors import EngineEndedError
from .kv_memory import free_memory
from .options import EngineOptions
from .plan import Mode, plan
from .runner import Flight, Runner, StepOutput
from .scheduler import Chunk
from .text.tokenizer import Tokenizer

GONE_S: Final = 5.0
"""How long an exchange that failed waits for the news that a rank is gone, and a rank that is told to end may take."""


class RankError(EngineEndedError):
    """A rank of a tensor-parallel engine failed, and with it the engine, which cannot be used any more."""


class Recipe(Protocol):
    """How every rank makes its part of the model. It is sent to the ranks, so it has to be importable and picklable."""

    def check(self, options: EngineOptions) -> None:
        """Raise `ValueError`, before any process starts, for what cannot be: on rank 0 alone."""

    def __call__(self, options: EngineOptions, device: torch.device, ranks: Ranks | None) -> tuple[Decoder, Tokenizer]:
        """The decoder of one of `ranks`, or of the whole model, on `device`."""
        ...


class Setup(NamedTuple):
    """The first message to a rank."""

    recipe: Recipe
    options: EngineOptions
    index: int
    rendezvous: str


class Loaded(NamedTuple):
    """A rank has its weights. free: bytes of memory that are left, None where that is not known."""

    choices: tuple[RowChoice, ...]
    free: int | None


class Failed(NamedTuple):
    """Why a rank ends."""

    text: str


class Prepare(NamedTuple):
    """Build and load all that will be called."""

    jobs: int | None


class Done(NamedTuple):
    """A rank has done what the last message asked for."""


def device_of(options: EngineOptions, index: int) -> torch.device:
    """Where a rank computes: rank r on cuda:r, or on the CPU that all share.

    Raises `ParallelError` for a device with a number, and for more ranks than there are GPUs.
    """
    name, count = options.device, options.tensor_parallel
    kind = name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise ParallelError(f"device={name!r} with tensor_parallel={count}: rank r runs on cuda:r; use cuda or cpu")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < count:
        raise ParallelError(f"tensor_parallel={count} takes {count} CUDA devices, and torch sees {there}")
    return torch.device("cuda", index)


def join(ranks: Ranks, device: torch.device, rendezvous: str) -> None:
    """Enter the process group: NCCL on GPUs, gloo on a CPU. Returns when every rank has."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{rendezvous}",
        rank=ranks.index,
        world_size=ranks.count,
        device_id=device if on_gpu else None,
    )
    distributed.all_reduce(torch.zeros(1, device=device))  # connects all to all, outside of any graph


class _Worker:
    """One other rank, as rank 0 sees it. code: its exit status once it has ended; killed: by us, for another's sake."""

    def __init__(self, index: int, ended: Callable[[_Worker], None]) -> None:
        ours, theirs = socket.socketpair()
        paths = [path for path in dict.fromkeys(sys.path) if path]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rapid_llm.engine.follower"],
                stdin=theirs,
                stdout=2,  # what a rank prints is no part of the answer
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        self.index = index
        self.channel = Connection(ours.detach())
        self.killed = False
        self._ended = ended
        threading.Thread(target=self._wait, name=f"rapid-llm-rank-{index}", daemon=True).start()

    def _wait(self) -> None:
        self.process.wait()
        self._ended(self)

    def kill(self) -> None:
        self.killed = True
        self.process.kill()

    def last_words(self) -> str:
        """Why it ended."""
        try:
            while self.channel.poll():
                message = self.channel.recv()
                if isinstance(message, Failed):
                    return message.text
        except (EOFError, OSError):
            pass  # it said nothing, so the exit status has to
        code = self.process.returncode
        return f"it was ended by signal {-code}" if code is not None and code < 0 else f"it ended with status {code}"


class Team:
    """The other ranks' processes, and this one's place among them. Not thread-safe: the engine's turn covers it."""

    def __init__(self, recipe: Recipe, options: EngineOptions) -> None:
        recipe.check(options)
        if not distributed.is_available():
            raise ParallelError(f"tensor_parallel={options.tensor_parallel}: this torch is built without distributed")
        if distributed.is_initialized():
            raise ParallelError(
                f"tensor_parallel={options.tensor_parallel}: this process is in a torch.distributed group already, "
                "another engine's or its own; close that engine, or start this one in a process of its own"
            )
        self.device = device_of(options, 0)
        self.ranks = Ranks(0, options.tensor_parallel)
        if self.device.type == "cuda":
            # Multicast over NVLink fails on hosts that do not grant it, and what is summed here gains nothing by it.
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
            # A rank that is gone is ours to handle: torch's watchdog would end this process for it.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._folder = tempfile.mkdtemp(prefix="rapid-llm-ranks-")
        self._rendezvous = os.path.join(self._folder, "rendezvous")
        self._gone = threading.Event()
        self._lock = threading.Lock()
        self._first: _Worker | None = None
        self._reason: str | None = None
        self._closing = False
        self._joined = False
        self._workers: list[_Worker] = []
        try:
            for index in range(1, self.ranks.count):
                self._workers.append(_Worker(index, self._ended))
                self._workers[-1].channel.send(Setup(recipe, options, index, self._rendezvous))
        except BaseException:
            self.close()
            raise

    # The start -------------------------------------------------------------------------------------------------------

    def agree(self, decoder: Decoder) -> int | None:
        """Wait until every rank has loaded its part; raise `RankError` unless all chose the same rows.

        Returns the bytes of memory that each rank may take, None where that is not known.
        """
        mine = choices(decoder.bindings())
        others: list[Loaded] = self._answers(Loaded)
        bad = disagreement([mine, *(loaded.choices for loaded in others)])
        if bad is not None:
            raise RankError(f"tensor_parallel={self.ranks.count}: {bad}")
        frees = [free for free in (free_memory(self.device), *(loaded.free for loaded in others)) if free is not None]
        shared = self.ranks.count if self.device.type == "cpu" else 1
        return min(frees) // shared if frees else None

    def lead(self, sizes: Sizes) -> Callable[..., LeadingRunner]:
        """Have every rank make its part of the cache, then form the group; what makes rank 0's runner."""
        self.send(sizes)
        self._answers(Done)
        self.send(Done())
        join(self.ranks, self.device, self._rendezvous)
        self._joined = True
        return partial(LeadingRunner, self)

    @property
    def described(self) -> str:
        """What `explain()` says."""
        how = "NCCL" if self.device.type == "cuda" else "gloo"
        return f"{self.ranks.count} ranks over {how}, which chose the same rows; memory is that of one rank"

    # Steps -----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, mode: Mode, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Within, this rank makes the step; the others are told to."""
        self.send(plan(mode, chunks))
        try:
            yield
        except BaseException as error:
            # The others are in the middle of a step that this rank left, or the other way about.
            if isinstance(error, Exception) and self._gone.wait(GONE_S):
                raise self._failure() from error
            self._end(f"rank 0 left a step: {type(error).__name__}: {error}")
            raise

    @contextlib.contextmanager
    def preparing(self, jobs: int | None) -> Iterator[None]:
        """Within, every rank builds and loads what it will call, by itself."""
        self.send(Prepare(jobs))
        self.ranks.apart = True
        try:
            yield
        finally:
            self.ranks.apart = False
            self._answers(Done)

    def check(self) -> None:
        """Raise `RankError` if a rank is gone."""
        if self._gone.is_set():
            raise self._failure()

    def send(self, message: Any) -> None:
        """To every other rank."""
        self.check()
        data = pickle.dumps(message)
        try:
            for worker in self._workers:
                worker.channel.send_bytes(data)
        except OSError as error:
            self._gone.wait(GONE_S)
            raise self._failure() from error

    def _answers(self, kind: type[Any]) -> list[Any]:
        """One message of `kind` from every other rank, by rank; raises as soon as one fails."""
        found: dict[int, Any] = {}
        waiting = {worker.channel: worker for worker in self._workers}
        while waiting:
            for channel in multiprocessing.connection.wait(list(waiting)):
                worker = waiting.pop(channel)  # type: ignore[arg-type]
                try:
                    message = worker.channel.recv()
                except (EOFError, OSError) as error:
                    self._gone.wait(GONE_S)
                    raise self._failure() from error
                if isinstance(message, Failed):
                    self._end(self._text(worker, message.text))
                    raise self._failure()
                found[worker.index] = message
        if not all(isinstance(message, kind) for message in found.values()):
            self._end(f"a rank answered {found}, not {kind.__name__}")
            raise self._failure()
        return [found[worker.index] for worker in self._workers]

    # The end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the other ranks and leave the group. May be called again."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        for worker in self._workers:
            worker.channel.close()  # which is how a rank is told to end
        for worker in self._workers:
            try:
                worker.process.wait(GONE_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.process.wait()
        if self._reason is None:
            self._reason = "it was closed"
        self._gone.set()
        if self._joined and distributed.is_initialized():
            distributed.destroy_process_group()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ended(self, worker: _Worker) -> None:
        """On a worker's own thread: it is gone. The first to go is the cause."""
        with self._lock:
            if self._closing or self._first is not None or worker.killed:
                return
            self._first = worker
            for other in self._workers:
                if other is not worker:
                    other.kill()
        if self.device.type == "cuda" and self._joined:
            # A kernel of NCCL waits for its peers for ever, and the host for the kernel.
            distributed.distributed_c10d._abort_process_group()
        self._gone.set()

    def _end(self, reason: str) -> None:
        """The engine cannot go on, for a reason of this process."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
            for worker in self._workers:
                worker.kill()
        self._gone.set()

    def _failure(self) -> RankError:
        with self._lock:
            if self._reason is None:
                first = self._first
                self._reason = "a rank is gone" if first is None else self._text(first, first.last_words())
        return RankError(f"tensor_parallel={self.ranks.count}: {self._reason}; the engine has ended, make a new one")

    def _text(self, worker: _Worker, text: str) -> str:
        return f"rank {worker.index} failed: {text}"


class LeadingRunner(Runner):
    """The runner of rank 0: tells the others of each step before it makes it."""

    def __init__(self, team: Team, *parts: Any) -> None:
        super().__init__(*parts)
        self._team = team

    def launch(self, chunks: Sequence[Chunk]) -> Flight:
        """As `Runner.launch`."""
        sized = self.graphs is not None and self.graphs.refusal(chunks) is None
        with self._team.step("sizes" if sized else "calls", chunks):
            return self._watched(super().launch(chunks))

    def launch_behind(self, flight: Flight, chunks: Sequence[Chunk]) -> Flight:
        """As `Runner.launch_behind`."""
        if flight.drawn is None:
            raise RuntimeError("a step whose tokens are not known can follow only one that samples")
        with self._team.step("behind", chunks):
            self._team.ranks.broadcast(flight.drawn.tokens.to(torch.int64))
            return self._watched(super().launch_behind(flight, chunks))

    def hidden_states(self, chunks: Sequence[Chunk]) -> Tensor:
        """As `Runner.hidden_states`."""
        with self._team.step("hidden", chunks):
            return super().hidden_states(chunks)

    def _watched(self, flight: Flight) -> Flight:
        watched = _Watched(*flight)
        watched.team = self._team
        return watched


class _Watched(Flight):
    """A flight whose results count only if no rank has gone while the device was waited for."""

    team: Team

    def wait(self) -> StepOutput:
        try:
            done = super().wait()
        except Exception:
            self.team.check()  # what the device says of an exchange that was broken off is not the cause
            raise
        self.team.check()
        return done
