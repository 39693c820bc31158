"""What the next step computes. Host integers only; no tensors, no clock.

Order is arrival, and nothing overtakes. Each step has a budget of tokens: requests that decode take one each, the
rest goes to prompts, in chunks. When the pool runs out, the youngest running request gives back its pages and waits
at the head of the line; its tokens are computed again later. Two rules bound this:

- a request whose worst case exceeds the pool is refused when it comes, so the oldest request can always go on;
- a preempted request returns only when the worst cases of all running ones and its own fit together, so that it is
  preempted at most once.

`running` is in order of arrival, and only its last request can be in the middle of its prompt. So a step goes from
old to young, and whoever is preempted has not been given a chunk of that step yet.

With a prefix cache a request begins behind what is known of its ids, but for the last one, whose logits it needs. With
a drafter, requests that decode get guesses out of what a step has left over: guesses never cost anyone pages or budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from .kv_pool import KVPool, Pages
from .prefix import Block, PrefixCache
from .request import FinishReason, Request


class Chunk(NamedTuple):
    """`size` tokens of `request` from its `num_computed` on; `samples` where they reach its last id.

    draft: guesses behind the last id, counted in `size`; each of their rows is sampled from as well.
    """

    request: Request
    size: int
    samples: bool
    draft: tuple[int, ...] = ()

    @property
    def decodes(self) -> bool:
        """Whether one id is computed, whatever is guessed behind it."""
        return self.size == 1 + len(self.draft)


class Drafter(Protocol):
    """What makes guesses."""

    def propose(self, request: Request, most: int) -> tuple[int, ...]:
        """At most `most` tokens that may come next."""
        ...


class Scheduler:
    """max_batch_tokens: budget of a step. max_running: most requests in a step. Not thread-safe.

    prefix: finds what is computed already; None computes everything. drafter: makes guesses; None makes none. grid:
    chunks of a prompt end at multiples of so many tokens (or at its end), and only whole ones of them are learnt by
    `prefix`; what a prompt's keys and values are then depends on its ids alone. None lets chunks end anywhere.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        max_batch_tokens: int,
        max_running: int,
        prefix: PrefixCache | None = None,
        drafter: Drafter | None = None,
        grid: int | None = None,
    ) -> None:
        if max_batch_tokens < max_running:
            raise ValueError(f"max_batch_tokens={max_batch_tokens} is below max_running={max_running}")
        if grid is not None and not 1 <= grid <= max_batch_tokens:
            raise ValueError(f"grid={grid}: use 1 to max_batch_tokens={max_batch_tokens}")
        if grid is not None and max_running != 1:  # a second prompt would begin beside one that waits for its place
            raise ValueError(f"max_running={max_running}: a grid needs 1")
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.prefix = prefix
        self.drafter = drafter
        self.grid = grid
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._blocked: Request | None = None
        self._blocked_at = 0
        self.hit_tokens = 0
        """Tokens that were found in the prefix cache."""

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

    def check_idle(self) -> None:
        """Raise `RuntimeError` if pages are held although no request is here."""
        held = self.pool.usable_pages - self.pool.free_pages
        if held and not self.has_work:
            raise RuntimeError(f"{held} pages of the cache are held by no request: the bookkeeping is broken")

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
                count = self._chunk(request.num_computed, request.remaining, budget)
                if self._grow(request, count):
                    prefills.append(Chunk(request, count, count == request.remaining))
                    budget -= count
        if self.preemptions == preempted_before:
            budget = self._admit(prefills, budget)
        if self.drafter is not None and budget > 0:
            decodes = self._guess(self.drafter, decodes, budget)
        return decodes + prefills

    def ahead(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks of the step behind that of `chunks`, which is not done yet; its requests then hold the pages.

        Empty where what comes behind depends on more than the tokens sampled: on requests that wait, on a request that
        reaches its length, on logits that are changed by what was sampled, or on pages that are not free.
        """
        if self.waiting or self.drafter is not None or len(chunks) != len(self.running):
            return []
        need = 0
        for chunk in chunks:
            request = chunk.request
            plain = request.guessable and request.params.logprobs is None
            if request.finished or not plain or len(request.ids) + 1 >= request.max_len:
                return []
            need += self.pool.pages_for(len(request.ids) + 1) - len(request.pages.ids)
        if need > self.pool.free_pages:
            return []
        for chunk in chunks:
            self.pool.grow(chunk.request.pages, len(chunk.request.ids) + 1, chunk.request.max_cached)
        return [Chunk(chunk.request, 1, True) for chunk in chunks]

    def commit(self, chunk: Chunk, kept: int | None = None) -> None:
        """Note that the chunk's tokens, or the first `kept` of them, are in the cache for good."""
        request = chunk.request
        request.num_computed += chunk.size if kept is None else kept
        if self.prefix is not None:
            final = request.num_computed
            if self.grid is not None:  # only what was computed in whole chunks of a prompt
                final = min(final, request.prompt_len)
                final -= final % self.prefix.granularity
            if final // self.pool.page_size > request.pages.blocks:
                self.prefix.learn(request.pages, request.salt, request.ids, final)

    def finish(self, request: Request, reason: FinishReason | None = None) -> None:
        """Take a request out and give its pages back; `reason` for one that did not end by itself."""
        if reason is not None and request.finish_reason is None:
            request.finish_reason = reason
        self.pool.release(request.pages)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self._blocked = None

    def reset(self) -> None:
        """Forget every request and what is known of prefixes, and take back every page, whatever state they are in."""
        for request in self.requests():
            request.pages = Pages()
            request.num_computed = 0
        self.running.clear()
        self.waiting.clear()
        self._blocked = None
        self.pool.reset()
        if self.prefix is not None:
            self.prefix.clear()

    def _chunk(self, start: int, remaining: int, budget: int) -> int:
        count = min(remaining, budget)
        return count if self.grid is None else min(count, self.grid - start % self.grid)

    def _admit(self, prefills: list[Chunk], budget: int) -> int:
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            request = self.waiting[0]
            if self._blocked is request and self.pool.free_pages <= self._blocked_at:
                break  # a long prompt is not looked up anew in each step until a page has been given back
            found = self._known(request)
            shared = len(found) if self.prefix is None else len(found) - self.prefix.idle(found)
            # The whole prompt must fit now, not just its first chunk, or two half-done prompts could block each other.
            fits = self.pool.pages_for(len(request.ids)) - shared <= self.pool.free_pages
            if not fits or (request.preemptions and not self._fits_for_good(request, shared)):
                self._blocked, self._blocked_at = request, self.pool.free_pages
                break
            self._blocked = None
            hit = len(found) * self.pool.page_size
            if self.prefix is not None and hit:
                self.prefix.share(request.pages, found)
                request.num_computed = hit
                self.hit_tokens += hit
                if not request.preemptions:
                    request.cached = hit
            count = self._chunk(hit, request.remaining, budget)
            self.pool.grow(request.pages, hit + count, request.max_cached)
            self.waiting.popleft()
            self.running.append(request)
            prefills.append(Chunk(request, count, count == request.remaining))
            budget -= count
        return budget

    def _known(self, request: Request) -> list[Block]:
        """What a request need not compute."""
        if self.prefix is None:
            return []
        limit = len(request.ids) - 1  # the last one's logits are wanted
        if request.wants_scores:
            limit = min(limit, request.scored - 1)  # and so are those of the prompt's tokens that have no score yet
        return self.prefix.find(request.salt, request.ids, limit)

    def _guess(self, drafter: Drafter, decodes: list[Chunk], budget: int) -> list[Chunk]:
        """`decodes` with guesses of at most `budget` tokens, for which nobody gives up a page."""
        guessed = []
        for chunk in decodes:
            request = chunk.request
            # The token behind the last guess that can be right is the last one of the answer.
            room = min(budget, request.max_len - len(request.ids) - 1) if request.guessable else 0
            draft = drafter.propose(request, room) if room > 0 else ()
            if draft and not self.pool.grow(request.pages, len(request.ids) + len(draft), request.max_cached):
                draft = draft[: len(request.pages.ids) * self.pool.page_size - len(request.ids)]
            if draft:
                chunk = Chunk(request, 1 + len(draft), True, draft)
                budget -= len(draft)
            guessed.append(chunk)
        return guessed

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

    def _fits_for_good(self, request: Request, shared: int) -> bool:
        """Whether all running requests and this one, `shared` pages of which others hold, can grow to their ends."""
        pages = self.pool.pages_for
        growth = sum(pages(other.max_cached) - len(other.pages.ids) for other in self.running)
        return pages(request.max_cached) - shared + growth <= self.pool.free_pages
