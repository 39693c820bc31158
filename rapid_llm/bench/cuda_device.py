"""An NVIDIA GPU as a device: blocks are CUDA graphs or queued calls, timed by events on one stream.

The timed window opens only after a kernel that blocks the stream has outlasted the host's enqueueing: the device never
waits for the host inside the window, and where it did, the timing says so. Clocks are read, never set.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from rapid_llm.graphs import capture

from .device import Block, Calibration, Call, Clocks, Timing
from .nvml import driver_version, read_clocks, read_use
from .peaks import peaks_of

BLOCK_TRIES: Final = 4
FIRST_LEAD: Final = 100e-6
LONGEST_LEAD: Final = 0.05
"""Seconds for which the stream is blocked while the host enqueues: at first, and at most."""

LAG_SECONDS: Final = 0.002
"""How long work is let run when leaks are looked for."""


class GraphBlock:
    """All calls in one CUDA graph, captured on the stream that times them."""

    graph = True

    def __init__(self, calls: Sequence[Call], stream: Any) -> None:
        import torch

        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        torch.cuda.synchronize()
        with capture(self._graph, stream):
            self.results = [call() for call in calls]
        self.launches: int | None = kernel_nodes(self._graph.raw_cuda_graph())
        if self.launches != 0:  # an empty graph runs as well, but there is nothing to run
            self._graph.instantiate()

    def enqueue(self) -> None:
        if self.launches != 0:
            self._graph.replay()


class QueuedBlock:
    """Calls made one after the other by the host."""

    graph = False
    launches: int | None = None

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = list(calls)
        self.results: list[Any] = []

    def enqueue(self) -> None:
        self.results = [call() for call in self._calls]


class CudaDevice:
    """See `device.Device`."""

    kind = "cuda"
    block_seconds = 300e-6
    max_copies = 128

    def __init__(self, index: int | None = None) -> None:
        import torch

        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        facts = torch.cuda.get_device_properties(self._device)
        self.name = facts.name
        self.cache_bytes = int(facts.L2_cache_size)
        self.peaks = peaks_of(facts.name)
        self.calibration: Calibration | None = None
        self.floors: dict[tuple[int, bool], float] = {}
        self._readers: dict[int, Call] = {}
        self._uuid = f"GPU-{facts.uuid}"
        self._stream = torch.cuda.Stream(self._device)
        self._tick = torch.zeros(1, device=self._device)
        self._cycles = 2.0e9
        self._leads: WeakKeyDictionary[Block, float] = WeakKeyDictionary()  # seconds that a block's blocker lasts

    def budget_bytes(self) -> int:
        import torch

        free, _ = torch.cuda.mem_get_info(self._device)
        return int(min(free // 4, 16 << 30))

    def block(self, calls: Sequence[Call], *, graph: bool) -> Block:
        import torch

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            return GraphBlock(calls, self._stream) if graph else QueuedBlock(calls)

    def time(self, block: Block, before: Call | None, again: Call | None = None) -> Timing:
        import torch

        timing = Timing(0.0, True)
        for attempt in range(BLOCK_TRIES):
            if attempt and again is not None:
                again()
            timing = self._once(block, before)
            if not timing.host_bound:
                break
        torch.cuda.synchronize(self._device)
        return timing

    def _once(self, block: Block, before: Call | None) -> Timing:
        """One timed run. The start event must still be pending when the end event has been enqueued."""
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if not block.graph:
            block.results = []
        torch.cuda.synchronize(self._device)
        reset_persisting_cache()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if before is not None:
                before()
            lead = self._leads.get(block, FIRST_LEAD)
            torch.cuda._sleep(int(lead * self._cycles))
            start.record(self._stream)
            began = time.perf_counter()
            block.enqueue()
            end.record(self._stream)
            late = start.query()
            host = time.perf_counter() - began
        end.synchronize()
        if late:
            self._leads[block] = min(max(2 * lead, 1.5 * host), LONGEST_LEAD)
        return Timing(start.elapsed_time(end) / 1e3, bool(late))

    def lag(self, block: Block) -> tuple[float, float]:
        import torch

        once = max(self.time(block, None).seconds, 1e-6)
        runs = max(1, min(int(LAG_SECONDS / once), 100))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(self._leads.get(block, FIRST_LEAD) * self._cycles))
            start.record(self._stream)
            for _ in range(runs):
                block.enqueue()
            end.record(self._stream)
        end.synchronize()
        over = time.perf_counter()
        torch.cuda.synchronize(self._device)
        return start.elapsed_time(end) / 1e3, time.perf_counter() - over

    def settle(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)

    def reader(self, size: int) -> Call:
        if size not in self._readers:
            self._readers[size] = self._reader(size)
        return self._readers[size]

    def _reader(self, size: int) -> Call:
        import torch

        buffer = torch.ones(max(size // 4, 1), dtype=torch.float32, device=self._device)
        total = torch.zeros((), device=self._device)

        def read() -> None:
            torch.sum(buffer, dim=0, out=total)

        read()
        return read

    def noop(self) -> Call:
        tick = self._tick

        def launch() -> None:
            tick.add_(1)

        return launch

    def fallow(self, size: int) -> Any:
        import torch

        return torch.rand(max(size // 4, 1), device=self._device)

    def clocks(self) -> Clocks:
        return read_clocks(self._uuid)

    def utilisation(self) -> int | None:
        """Percent of the last moment in which a kernel of any program ran, this one's included."""
        return read_use(self._uuid)

    def describe(self) -> dict[str, Any]:
        described = {"kind": self.kind, "name": self.name, "cache_bytes": self.cache_bytes}
        return {**described, "peaks": self.peaks.json(), "driver": driver_version()}


def kernel_nodes(raw_graph: int) -> int | None:
    """How many kernels a captured graph launches; memory copies and fills count as work too. None if the driver does
    not tell."""
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t(0)
    graph = ctypes.c_void_p(raw_graph)
    if driver.cuGraphGetNodes(graph, None, ctypes.byref(count)) != 0:
        return None
    if count.value == 0:
        return 0
    nodes = (ctypes.c_void_p * count.value)()
    if driver.cuGraphGetNodes(graph, nodes, ctypes.byref(count)) != 0:
        return None
    kind = ctypes.c_int()
    working = 0
    for node in nodes:
        if driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) != 0:
            return None
        working += kind.value in (0, 1, 2)  # kernel, copy, fill
    return working


def reset_persisting_cache() -> None:
    """Give up lines of the L2 cache that a kernel asked to keep. A device without that feature refuses, which is
    fine."""
    ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache()
