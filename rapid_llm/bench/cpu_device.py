"""The CPU as a device: calls run in a loop, timed by the wall; what is left behind by other threads is noticed."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from typing import Any

from rapid_llm.platform import cpu_info

from .bandwidth import last_cache_bytes
from .device import Block, Calibration, Call, Clocks, Timing
from .host import Clock
from .peaks import cpu_peaks


class CpuBlock:
    """Calls in a list, their results kept from the last run."""

    graph = False
    launches: int | None = None

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = list(calls)
        self.results: list[Any] = []

    def enqueue(self) -> None:
        self.results = [call() for call in self._calls]


class CpuDevice:
    """See `device.Device`. clock: nanoseconds. budget: bytes for copies, by default a quarter of what is free, at most
    2 GiB."""

    kind = "cpu"
    block_seconds = 0.004
    max_copies = 64

    def __init__(self, clock: Clock = time.perf_counter_ns, budget: int | None = None) -> None:
        info = cpu_info()
        self.name = info.model
        self.cache_bytes = last_cache_bytes()
        self.peaks = cpu_peaks(info.affinity)
        self.calibration: Calibration | None = None
        self.floors: dict[tuple[int, bool], float] = {}
        self._readers: dict[int, Call] = {}
        self._clock = clock
        self._budget = budget

    def budget_bytes(self) -> int:
        return self._budget if self._budget is not None else min(_free_memory() // 4, 2 << 30)

    def block(self, calls: Sequence[Call], *, graph: bool) -> CpuBlock:
        del graph  # there are none on a CPU
        return CpuBlock(calls)

    def time(self, block: Block, before: Call | None, again: Call | None = None) -> Timing:
        del again  # the first try counts
        block.results = []  # of the previous run: freed outside of the window
        if before is not None:
            before()
        was_on = gc.isenabled()
        gc.disable()
        try:
            start = self._clock()
            block.enqueue()
            spent = self._clock() - start
        finally:
            if was_on:
                gc.enable()
        return Timing(spent / 1e9)

    def lag(self, block: Block) -> tuple[float, float]:
        before = threading.active_count()
        started = {thread.ident for thread in threading.enumerate()}
        spent = self.time(block, None).seconds
        left = [thread for thread in threading.enumerate() if thread.ident not in started]
        if threading.active_count() <= before or not left:
            return spent, 0.0
        start = self._clock()
        for thread in left:
            thread.join(timeout=1.0)
        return spent, max((self._clock() - start) / 1e9, spent)

    def settle(self) -> None:
        """Calls on a CPU are over when they return."""

    def reader(self, size: int) -> Call:
        if size not in self._readers:
            self._readers[size] = self._reader(size)
        return self._readers[size]

    def _reader(self, size: int) -> Call:
        import torch

        buffer = torch.ones(max(size // 8, 1), dtype=torch.int64)
        return lambda: buffer.sum()

    def noop(self) -> Call:
        return _nothing

    def fallow(self, size: int) -> Any:
        import torch

        return torch.rand(max(size // 4, 1))

    def clocks(self) -> Clocks:
        return Clocks()

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "cache_bytes": self.cache_bytes, "peaks": self.peaks.json()}


def _nothing() -> None:
    pass


def _free_memory() -> int:
    import os

    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # a system that does not tell
        return 4 << 30
