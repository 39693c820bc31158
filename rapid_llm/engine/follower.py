"""A rank other than the first: a process that loads its part of a model and carries out the plans of rank 0.

python -m rapid_llm.engine.follower, with a socket as standard input; started by `parallel.Team`.

Invariant: it never outlives rank 0. The end of the socket is its own end, whatever it is doing.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels.preparation import prepare
from rapid_llm.models.decoder import Decoder
from rapid_llm.models.parallel import Ranks

from . import parallel
from .agreement import choices
from .assembly import Parts, Sizes, assemble, use_threads
from .host_memory import keep_freed_memory
from .kv_memory import free_memory
from .plan import Plan, chunks_of
from .prompt_logprobs import rows_at_a_time
from .scheduler import Chunk
from .warmup import steps

LOOK_MS: Final = 500
"""Between two looks for the parent process."""


class Follower:
    """One rank with its part of the model."""

    def __init__(self, decoder: Decoder, ranks: Ranks, sizes: Sizes, parts: Parts) -> None:
        self.device = decoder.device
        self._decoder = decoder
        self._ranks = ranks
        self._sizes = sizes
        self._parts = parts

    def carry_out(self, plan: Plan) -> None:
        """Make the exchanges that rank 0 makes in the step, and write what it writes into this rank's cache."""
        chunks = chunks_of(plan)
        with torch.inference_mode():
            if plan.mode in ("sizes", "behind"):
                self._sized(chunks, behind=plan.mode == "behind")
            else:
                self._calls(chunks, logits=plan.mode == "calls")

    def _sized(self, chunks: list[Chunk], *, behind: bool) -> None:
        graphs = self._parts.graphs
        if graphs is None:
            raise RuntimeError("rank 0 runs steps of fixed size, and this rank was not told to")
        if behind:
            tokens = torch.empty(len(chunks), dtype=torch.int64, device=self.device)
            graphs.take_tokens(self._ranks.broadcast(tokens))
        graphs.logits(chunks, ahead=behind)

    def _calls(self, chunks: list[Chunk], *, logits: bool) -> None:
        batch = self._parts.builder.build(chunks)
        hidden: Tensor = self._decoder.forward(batch.input_ids, batch.meta, self._parts.kv)
        if logits:
            rows = rows_at_a_time(self._sizes.vocab_size)
            for part in batch.scores:
                for row in range(part.row, part.row + len(part.targets), rows):
                    self._decoder.compute_logits(hidden[row : min(row + rows, part.row + len(part.targets))])
            if batch.sampling:
                chosen = hidden if batch.logit_rows is None else hidden.index_select(0, batch.logit_rows)
                self._decoder.compute_logits(chosen)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the builder's buffers are written again by the next plan

    def prepare(self, jobs: int | None) -> None:
        """Build and load what this rank calls, without the others."""
        self._ranks.apart = True
        try:
            prepare(model=self, jobs=jobs)
        finally:
            self._ranks.apart = False

    def bindings(self) -> list[tuple[str, str, Any]]:
        """For `prepare`."""
        return self._decoder.bindings()

    def rehearsals(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """For `prepare`; nothing is sampled here."""
        if self.device.type == "cpu":
            return iter(())
        sizes = self._sizes
        limits = {"max_tokens": sizes.tokens, "max_sequences": sizes.sequences, "max_rows": sizes.rows}
        return steps(self._decoder, self._parts.kv, None, **limits)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all of a job, they are rank 0's to handle
        signal.signal(number, signal.SIG_IGN)
    channel = Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_end_with_parent, args=(channel.fileno(),), daemon=True).start()
    try:
        _serve(channel)
    except EOFError:
        status = 0
    except BaseException as error:
        traceback.print_exc()
        status = 1
        _say(channel, f"{type(error).__name__}: {error}")
    sys.stderr.flush()
    os._exit(status)  # the group's own farewell waits for ranks that may be gone


def _serve(channel: Connection) -> None:
    setup: parallel.Setup = channel.recv()
    options = setup.options
    ranks, device = Ranks(setup.index, options.tensor_parallel), parallel.device_of(options, setup.index)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    use_threads(options, device)
    decoder, _ = setup.recipe(options, device, ranks)
    channel.send(parallel.Loaded(choices(decoder.bindings()), free_memory(device)))
    sizes: Sizes = channel.recv()
    parts = assemble(decoder, sizes, options, ranks)
    channel.send(parallel.Done())
    channel.recv()
    parallel.join(ranks, device, setup.rendezvous)
    follower = Follower(decoder, ranks, sizes, parts)
    while True:
        message = channel.recv()
        if isinstance(message, Plan):
            follower.carry_out(message)
        elif isinstance(message, parallel.Prepare):
            follower.prepare(message.jobs)
            channel.send(parallel.Done())
        else:
            raise TypeError(f"rank 0 sent {message!r}")


def _say(channel: Connection, text: str) -> None:
    try:
        channel.send(parallel.Failed(text))
    except OSError as error:  # rank 0 is gone: there is nobody to tell but the log
        print(f"rank 0 could not be told: {error}", file=sys.stderr)


def _end_with_parent(descriptor: int) -> None:
    """End this process when the socket's other end is closed, or its owner is gone."""
    poll, parent = select.poll(), os.getppid()
    poll.register(descriptor, 0)  # hang-ups and errors are told unasked
    while not poll.poll(LOOK_MS) and os.getppid() == parent:
        continue
    os._exit(1)


if __name__ == "__main__":
    main()
