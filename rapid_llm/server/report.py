"""The live step report: which row runs each op, at how many GB/s, and what share of the memory's limit that is.

Timing ops slows the steps that are looked into, so the engine is watched only while somebody asks: from a request of
the report until `WATCH_S` after the last one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from rapid_llm.engine.clock import now

if TYPE_CHECKING:
    from rapid_llm.engine.stats import Stats

    from .service import Service

WATCH_S: Final = 10.0
EVERY: Final = 8
"""Of the decode steps, one in so many is timed op by op."""


class Report:
    """read_bandwidth: bytes a second that the memory can give, and how that was measured."""

    def __init__(self, service: Service, read_bandwidth: tuple[float, str]) -> None:
        self.watch_s = WATCH_S
        self._service = service
        self._bandwidth = read_bandwidth
        self._stats: Stats | None = None
        self._asked = 0.0
        self._ending: asyncio.Task[None] | None = None
        self._choices: list[dict[str, Any]] | None = None

    async def json(self) -> dict[str, Any]:
        """`model`, `settings`, `memory`, `requests`, `choices` (each op's row, and why), and `live`: the figures of the
        steps since somebody began to ask, which is None where there were none."""
        self._asked = now()
        if self._stats is None:
            await self._service.engine.call(self._watch)
            if self._ending is None or self._ending.done():
                self._ending = asyncio.create_task(self._end_when_nobody_asks())
        live = await self._service.engine.call(self._live)
        explanation = await self._service.in_pool(self._explain)
        scheduler = self._service.served.engine.scheduler
        pool = scheduler.pool
        requests = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "cache_used": (pool.usable_pages - pool.free_pages) / pool.usable_pages,
            "prefix_hit_tokens": scheduler.hit_tokens,
        }
        return {"model": self._service.served.name, "requests": requests, "live": live, **explanation}

    async def close(self) -> None:
        """Stop watching."""
        if self._ending is not None:
            self._ending.cancel()

    def _watch(self) -> None:
        """On the engine's thread, as all that touches the statistics: a step reads them."""
        if self._stats is None:
            stats = self._service.served.llm.stats(every=EVERY)
            stats.__enter__()
            self._stats = stats

    def _live(self) -> dict[str, Any] | None:
        if self._stats is None:
            return None
        found = self._stats.report(read_bandwidth=self._bandwidth)
        return found.json() if found.phases else None

    def _unwatch(self) -> None:
        if self._stats is not None:
            self._stats.__exit__()
            self._stats = None

    async def _end_when_nobody_asks(self) -> None:
        while (left := self._asked + self.watch_s - now()) > 0:
            await asyncio.sleep(min(left, 0.25))
        await self._service.engine.call(self._unwatch)

    def _explain(self) -> dict[str, Any]:
        from rapid_llm.engine.explain import table

        explanation = self._service.served.llm.explain()
        if self._choices is None:  # rows are bound once
            columns = ("op", "where", "row", "why")
            self._choices = [dict(zip(columns, line, strict=True)) for line in table(explanation.bindings)]
        settings = {name: str(value) for name, value in explanation.settings.items()}
        return {"settings": settings, "memory": explanation.memory, "choices": self._choices}
