"""A scripted GPU: real tensors on the CPU, and time that passes only where a launch says so.

Functions under test call `device.launch(seconds, effect)`. Within a capture a launch on the main stream is recorded,
and its effect happens at each replay; what is computed without a launch happens at once, as host work does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rapid_llm.bench.device import Calibration, Call, Clocks, Timing
from rapid_llm.bench.peaks import Peaks, peaks_of

FLOOR = 1e-6


class Graph:
    graph = True

    def __init__(self, device: FakeDevice, calls: Sequence[Call]) -> None:
        self._device = device
        self._steps: list[tuple[float, Callable[[], object] | None]] = []
        device.capture = self._steps
        try:
            self.results = [call() for call in calls]
        finally:
            device.capture = None
        self.launches: int | None = len(self._steps)

    def enqueue(self) -> None:
        for seconds, effect in self._steps:
            self._device.launch(seconds, effect)


class Queue:
    graph = False
    launches: int | None = None

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = list(calls)
        self.results: list[Any] = []

    def enqueue(self) -> None:
        self.results = [call() for call in self._calls]


@dataclass
class FakeDevice:
    """noise: called with the number of the timed block, gives a factor. states: clocks, one a reading."""

    name: str = "NVIDIA H200"
    kind: str = "cuda"
    cache_bytes: int = 60_000_000
    block_seconds: float = 20e-6
    max_copies: int = 8
    memory: int = 1 << 28
    noise: Callable[[int], float] = lambda index: 1.0
    states: Iterator[Clocks] | None = None
    host_bound: bool = False
    tries: int = 1
    calibration: Calibration | None = field(default_factory=lambda: Calibration(2e-6, 1e-6, 4e12, "scripted"))
    floors: dict[tuple[int, bool], float] = field(default_factory=dict)
    peaks: Peaks = field(init=False)
    main: float = 0.0
    side: float = 0.0
    timed: int = 0
    flushed: list[int] = field(default_factory=list)
    capture: list[tuple[float, Callable[[], object] | None]] | None = None

    def __post_init__(self) -> None:
        self.peaks = peaks_of(self.name)

    def launch(self, seconds: float, effect: Callable[[], object] | None = None, *, stream: str = "main") -> None:
        if self.capture is not None:
            if stream != "main":
                raise RuntimeError("capture: another stream has work that was not joined")
            self.capture.append((seconds, effect))
            return
        if effect is not None:
            effect()
        if stream == "main":
            self.main += seconds
        else:
            self.side += seconds

    def budget_bytes(self) -> int:
        return self.memory

    def block(self, calls: Sequence[Call], *, graph: bool) -> Graph | Queue:
        return Graph(self, calls) if graph else Queue(calls)

    def time(self, block: Any, before: Call | None, again: Call | None = None) -> Timing:
        if before is not None:
            before()
        for _ in range(self.tries - 1):  # as a GPU does where the host was late
            block.enqueue()
            if again is not None:
                again()
        start = self.main
        block.enqueue()
        self.timed += 1
        return Timing((self.main - start) * self.noise(self.timed), self.host_bound)

    def lag(self, block: Any) -> tuple[float, float]:
        main, side = self.main, self.side
        block.enqueue()
        return self.main - main, max(self.side - side - (self.main - main), 0.0)

    def settle(self) -> None:
        """Everything is over at once."""

    def reader(self, size: int) -> Call:
        return lambda: self.flushed.append(size)

    def noop(self) -> Call:
        return lambda: self.launch(FLOOR)

    def fallow(self, size: int) -> torch.Tensor:
        return torch.rand(max(size // 4, 1))

    def clocks(self) -> Clocks:
        return next(self.states) if self.states is not None else Clocks()

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "cache_bytes": self.cache_bytes, "peaks": self.peaks.json()}
