"""From logits to tokens. Invariant: what a request is given depends on its own logits and parameters alone.

Randomness is a function of (the request's key, how many tokens it has) and nothing else: no generator has a state
that a neighbour, an abort or a preemption could move. Reported log-probabilities are of the model's own logits,
before anything here changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rapid_llm.kernels import Selected, dispatch

from .masks import TokenMasks
from .penalties import LogitEditor
from .request import Request

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that scatters every bit."""
    x &= _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def request_key(seed: int, *path: int) -> int:
    """The key of a request's random numbers, from a seed and the numbers that tell it from others of that seed."""
    key = mix(seed + _GOLDEN)
    for number in path:
        key = mix(key + (number + 1) * _GOLDEN)
    return key


def uniform(key: int, position: int) -> float:
    """The number in [0, 1) that chooses a request's token `position`: 24 random bits, which fp32 holds exactly."""
    return (mix(key + (position + 1) * _GOLDEN) >> 40) * 2.0**-24


class RawLogprob(NamedTuple):
    token: int
    logprob: float
    rank: int


class Choice(NamedTuple):
    """token: -1 where the row's logits are unusable. logprobs: the sampled token first, then the most probable ones."""

    token: int
    logprobs: list[RawLogprob] | None = None


class Drawn(NamedTuple):
    """Tokens on their way. tokens: (rows,) on the device. on_host: their copy, there once `done` has happened."""

    sampler: Sampler
    tokens: Tensor
    on_host: Tensor
    done: Any
    logprobs: Tensor | None
    wanted: list[int]
    requests: Sequence[Request]

    def choices(self) -> list[Choice]:
        """One a row. Waits for the tokens, and not for what was enqueued behind them unless log-probabilities are
        wanted."""
        if self.done is not None:
            self.done.synchronize()
        tokens: list[int] = self.on_host.tolist()
        if self.logprobs is None:
            return [Choice(token) for token in tokens]
        reported = self.sampler.report(self.logprobs, self.wanted, self.requests, tokens)
        return [Choice(token, reported.get(i)) for i, token in enumerate(tokens)]


class Sampler:
    """vocab_size: ids from here on are padding of the embedding table and are never sampled. max_rows: of one call."""

    def __init__(self, vocab_size: int, device: torch.device, max_rows: int) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self._max_rows = max_rows
        self._bound: dict[int, tuple[Selected, Callable[..., Tensor]]] = {}
        self._observer: Any = None
        self._on_cpu = device.type == "cpu"
        self._greedy: dict[int, tuple[Tensor, Tensor]] = {}
        """Parameters of batches that are greedy throughout, by their rows: the same in every step, so uploaded once."""
        self._side = None if self._on_cpu else torch.cuda.Stream(device)
        self._real = torch.zeros(4, max_rows, dtype=torch.float32)
        self._top_k = torch.zeros(max_rows, dtype=torch.int32)
        self._edit = LogitEditor(device)
        self._mask = TokenMasks(device, max_rows)

    def __call__(self, logits: Tensor, requests: Sequence[Request]) -> list[Choice]:
        """One choice per row; logits: (len(requests), at least vocab_size), which are this call's to change."""
        return self.draw(logits, requests).choices()

    def draw(self, logits: Tensor, requests: Sequence[Request]) -> Drawn:
        """Enqueue what `__call__` does; nothing is waited for, and the logits may be written again by later steps."""
        logits = logits[:, : self.vocab_size]
        wanted = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
        logprobs = torch.log_softmax(logits[wanted].float(), dim=-1) if wanted else None
        self._shape(logits, requests)
        tokens = self._draw(logits, requests)
        if self._side is None:
            return Drawn(self, tokens, tokens, None, logprobs, wanted, requests)
        # Copied on a stream of their own: neither does the next step wait for the copy, nor the host for that step.
        on_host, done = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True), torch.cuda.Event()
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            on_host.copy_(tokens, non_blocking=True)
            done.record()
        return Drawn(self, tokens, on_host, done, logprobs, wanted, requests)

    def _draw(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        reals, ks = self._parameters(requests)
        temperature, top_p, min_p, draws = reals.unbind(0)
        return self._row(len(requests))[1](logits, temperature, ks, top_p, min_p, draws)

    def _parameters(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """(4, rows) temperature, top_p, min_p and random number, and (rows,) top_k, on the device."""
        count = len(requests)
        plain = not self._on_cpu and all(request.params.greedy for request in requests)
        if plain and count in self._greedy:
            return self._greedy[count]
        if self._on_cpu:
            reals, ks = self._real[:, :count], self._top_k[:count]
        else:  # of its own for each call: the copies of the last one may still wait for the device
            reals = torch.empty(4, count, dtype=torch.float32, pin_memory=True)
            ks = torch.empty(count, dtype=torch.int32, pin_memory=True)
        real, top_k = reals.numpy(), ks.numpy()
        for i, request in enumerate(requests):
            params = request.params
            if params.greedy:
                real[:, i] = (0.0, 1.0, 0.0, 0.0)
                top_k[i] = 0
            else:
                draw = uniform(request.key, request.output_len)
                real[:, i] = (params.temperature, params.top_p, params.min_p, draw)
                top_k[i] = params.top_k
        if not self._on_cpu:
            reals, ks = reals.to(self._device, non_blocking=True), ks.to(self._device, non_blocking=True)
        if plain:
            self._greedy[count] = reals, ks
        return reals, ks

    def rehearse(self, logits: Tensor) -> None:
        """Draw from `logits` for nobody: the call that `__call__` makes, for the sake of the kernels it launches."""
        count = len(logits)
        real = torch.zeros_like(self._real, device=self._device)
        top_k = torch.zeros(count, dtype=torch.int32, device=self._device)
        temperature, top_p, min_p, draws = real[:, :count].unbind(0)
        self._row(count)[0](logits[:, : self.vocab_size], temperature, top_k, top_p, min_p, draws)

    def bindings(self) -> list[tuple[str, str, Selected]]:
        """(row counts, op id, handle), as a decoder's `bindings`."""
        counts = sorted({1, self._max_rows})
        return [(f"{count} row{'s'[: count > 1]}", "sample", self._row(count)[0]) for count in counts]

    def observe(self, observer: Any) -> None:
        """Send calls of the op through `observer.call(op_id, row_name, fn, args, kwargs)`; None ends it."""
        self._observer = observer
        self._bound.clear()

    def _row(self, count: int) -> tuple[Selected, Callable[..., Tensor]]:
        """The handle for so many rows, and what is called: the handle itself or, under observation, its observer."""
        found = self._bound.get(count)
        if found is None:
            dims = {"rows": count, "vocab": self.vocab_size}
            handle = dispatch("sample", device=str(self._device), dtype="fp32", dims=dims)
            found = self._bound[count] = (handle, self._observed(handle))
        return found

    def _observed(self, handle: Selected) -> Callable[..., Tensor]:
        observer = self._observer
        if observer is None:
            return handle
        return lambda *args: observer.call("sample", handle.spec.name, handle, args, {})

    def _shape(self, logits: Tensor, requests: Sequence[Request]) -> None:
        """Penalties, biases, early stops, then structure; nothing at all where no request asks for any."""
        edited, constrained = [], []
        for i, request in enumerate(requests):
            if request.edits is not None:
                request.edits.count(request.ids)
                edited.append((i, request.edits))
            if request.constraint is not None:
                constrained.append((i, request.constraint))
        if edited:
            self._edit(logits, edited)
        if constrained:
            self._mask(logits, constrained)

    def report(
        self, logprobs: Tensor, rows: list[int], requests: Sequence[Request], tokens: list[int]
    ) -> dict[int, list[RawLogprob]]:
        """What is told of the log-probabilities (len(rows), vocab) of `rows`, by row. Waits for the device."""
        chosen = torch.tensor([max(tokens[i], 0) for i in rows], device=logprobs.device).unsqueeze(1)
        chosen_logprobs = logprobs.gather(1, chosen)
        ranks = (logprobs > chosen_logprobs).sum(1) + 1
        most = min(max(requests[i].params.logprobs or 0 for i in rows), self.vocab_size)
        top = logprobs.topk(most, dim=1)
        own = zip(chosen_logprobs[:, 0].tolist(), ranks.tolist(), strict=True)
        best = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        reported = {}
        for i, (logprob, rank), (ids, values) in zip(rows, own, best, strict=True):
            entries = [RawLogprob(tokens[i], logprob, rank)]
            for position in range(min(requests[i].params.logprobs or 0, most)):
                if ids[position] != tokens[i]:
                    entries.append(RawLogprob(ids[position], values[position], position + 1))
            reported[i] = entries
        return reported
