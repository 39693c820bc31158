"""What the next step computes. Host integers only; no tensors, no clock.

Order is arrival, and nothing overtakes. Each step has a budget of tokens: requests that decode take one each, the
rest goes to prompts, in chunks. When the pool runs out, the youngest running request gives back its pages and waits
at the head of the line; its tokens are computed again later. Two rules bound this:

- a request whose worst case exceeds the pool is refused when it comes, so the oldest request can always go on;
- a preempted request returns only when the worst cases of all running ones and its own fit together, so that it is
  preempted at most once.

`running` is in order of arrival, and only its last request can be in the middle of its prompt. So a step goes from
old to young, and whoever is preempted has not been given a chunk of that step yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from .kv_pool import KVPool, Pages
from .request import FinishReason, Request


class Chunk(NamedTuple):
    """`size` tokens of `request` from its `num_computed` on; `samples` where they reach its last id."""

    request: Request
    size: int
    samples: bool


class Scheduler:
    """max_batch_tokens: budget of a step. max_running: most requests in a step. Not thread-safe."""

    def __init__(self, pool: KVPool, *, max_batch_tokens: int, max_running: int) -> None:
        if max_batch_tokens < max_running:
            raise ValueError(f"max_batch_tokens={max_batch_tokens} is below max_running={max_running}")
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def requests(self) -> Iterator[Request]:
        """Every request that holds or may come to hold pages."""
        yield from self.running
        yield from self.waiting

    def check_fits(self, tokens: int) -> None:
        """Raise `ValueError`, with both numbers, if a request that may cache `tokens` tokens could never finish."""
        if self.pool.pages_for(tokens) > self.pool.usable_pages:
            raise ValueError(
                f"the request may need {tokens} tokens of key/value cache, and there are {self.pool.usable_tokens}: "
                "shorten the prompt, lower max_tokens, or raise kv_cache_tokens"
            )

    def add(self, request: Request) -> None:
        self.check_fits(request.max_cached)
        self.waiting.append(request)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, decodes first, whose requests hold the pages for them. Empty without work."""
        budget = self.max_batch_tokens
        decodes: list[Chunk] = []
        prefills: list[Chunk] = []
        preempted_before = self.preemptions
        for request in tuple(self.running):  # decodes first: a long prompt must not make them wait
            if request.remaining == 1 and self._grow(request, 1):
                decodes.append(Chunk(request, 1, True))
                budget -= 1
        for request in tuple(self.running):
            if request.remaining > 1 and budget > 0:
                count = min(request.remaining, budget)
                if self._grow(request, count):
                    prefills.append(Chunk(request, count, count == request.remaining))
                    budget -= count
        if self.preemptions == preempted_before:
            budget = self._admit(prefills, budget)
        return decodes + prefills

    def commit(self, chunk: Chunk) -> None:
        """Note that the chunk's tokens are in the cache."""
        chunk.request.num_computed += chunk.size

    def finish(self, request: Request, reason: FinishReason | None = None) -> None:
        """Take a request out and give its pages back; `reason` for one that did not end by itself."""
        if reason is not None and request.finish_reason is None:
            request.finish_reason = reason
        self.pool.release(request.pages)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def reset(self) -> None:
        """Forget every request and take back every page, whatever state they are in."""
        for request in self.requests():
            request.pages = Pages()
            request.num_computed = 0
        self.running.clear()
        self.waiting.clear()
        self.pool.reset()

    def _admit(self, prefills: list[Chunk], budget: int) -> int:
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            request = self.waiting[0]
            if request.preemptions and not self._fits_for_good(request):
                break
            count = min(request.remaining, budget)
            # The whole prompt must fit now, not just its first chunk, or two half-done prompts could block each other.
            if self.pool.pages_for(len(request.ids)) > self.pool.free_pages:
                break
            self.pool.grow(request.pages, count, request.max_cached)
            self.waiting.popleft()
            self.running.append(request)
            prefills.append(Chunk(request, count, count == request.remaining))
            budget -= count
        return budget

    def _grow(self, request: Request, count: int) -> bool:
        """Pages for `count` more tokens, at the cost of younger requests; False if the request itself had to go."""
        if not request.pages.ids:  # preempted a moment ago, by an older one
            return False
        while not self.pool.grow(request.pages, request.num_computed + count, request.max_cached):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        self.pool.release(victim.pages)
        victim.num_computed = 0
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(victim)

    def _fits_for_good(self, request: Request) -> bool:
        pages = self.pool.pages_for
        growth = sum(pages(other.max_cached) - len(other.pages.ids) for other in self.running)
        return pages(request.max_cached) + growth <= self.pool.free_pages
