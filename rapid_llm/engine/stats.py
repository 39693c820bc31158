"""Where an engine's time goes: tokens a second, and each op's row, time and bandwidth beside what the memory can do.

Timing every op slows a step, so of the decode steps only one in so many is looked into. Rates come from the other
steps; shares and bandwidths come from these. Bytes are those that the op's declared work must move (weights as the
model's file stores them), so a row that reads a larger form of the weights shows as a lower rate, not as a better
one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final, Protocol

import torch

from rapid_llm.kernels.ops.block_formats import row_bytes
from rapid_llm.kernels.registry import get_op, rows

from .clock import call_timer, now
from .core import Engine, StepFigures, StepTotals
from .scheduler import Chunk

PHASES: Final = ("prefill", "decode")


class Observable(Protocol):
    """A decoder or a sampler: whatever lets its op calls be watched."""

    def observe(self, observer: Any) -> None: ...


@dataclass(slots=True)
class OpTotals:
    """Over the steps looked into: calls, seconds, bytes that had to be moved, floating point operations."""

    calls: int = 0
    seconds: float = 0.0
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True)
class OpFigure:
    """One line of a report. share: of the phase's time. bandwidth_share: of the machine's measured read bandwidth.

    row is empty in the line for what no op accounts for: the engine's own host work and gaps.
    """

    phase: str
    op: str
    row: str
    calls: int
    seconds: float
    share: float
    gb_per_s: float
    bandwidth_share: float
    gflop_per_s: float


@dataclass(frozen=True, slots=True)
class PhaseFigure:
    """tokens_per_s leaves out the steps whose ops were timed, unless there are no others (`observed_only`)."""

    phase: str
    steps: int
    tokens: int
    seconds: float
    tokens_per_s: float
    observed_steps: int
    observed_only: bool


@dataclass(frozen=True, slots=True)
class StatsReport:
    """read_bandwidth: bytes a second, and how it was measured. threads: torch's, on CPU. guessed, accepted: tokens of
    guesses, and those of them that were right."""

    phases: tuple[PhaseFigure, ...]
    ops: tuple[OpFigure, ...]
    read_bandwidth: float
    read_bandwidth_by: str
    threads: int
    guessed: int = 0
    accepted: int = 0

    def json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = []
        for p in self.phases:
            note = " (every step was timed op by op, which slows it)" if p.observed_only else ""
            lines.append(f"{p.phase}: {p.tokens_per_s:.1f} tok/s over {p.steps} steps, {p.tokens} tokens{note}")
        if self.guessed:
            lines.append(
                f"guesses: {self.accepted} of {self.guessed} tokens right ({self.accepted / self.guessed:.0%})"
            )
        lines.append(f"read bandwidth {self.read_bandwidth / 1e9:.1f} GB/s ({self.read_bandwidth_by})")
        rows = [("phase", "op", "row", "calls", "share", "GB/s", "of limit", "GFLOP/s")]
        for f in self.ops:
            moved = (f"{f.gb_per_s:.1f}", f"{f.bandwidth_share:.0%}", f"{f.gflop_per_s:.1f}") if f.row else ("", "", "")
            rows.append((f.phase, f.op, f.row, str(f.calls), f"{f.share:.1%}", *moved))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            cells = [f"{c:<{w}}" if i < 3 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


class Stats:
    """Watches an engine while it is entered; one at a time. every: look into one decode step in so many."""

    def __init__(self, engine: Engine, watched: Sequence[Observable], device: torch.device, *, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: use an integer of 1 or more")
        self._engine = engine
        self._watched = watched
        self._device = device
        self._every = every
        self._decode_steps = 0
        self._plain = StepTotals()
        self._guesses = (engine.totals.guessed, engine.totals.accepted)
        self._observed = StepTotals()
        self._observers = {phase: _Observer(device) for phase in PHASES}

    def __enter__(self) -> Stats:
        if self._engine.step_hook is not None:
            raise RuntimeError("this engine's statistics are being taken already; end that `with` block first")
        self._engine.step_hook = self._step
        return self

    def __exit__(self, *exc: object) -> None:
        self._engine.step_hook = None

    def report(self, *, read_bandwidth: tuple[float, str] | None = None) -> StatsReport:
        """Figures so far. read_bandwidth: (bytes a second, how) if it is known; measured now if not, in about 0.3 s."""
        limit, by = measured_bandwidth(self._device) if read_bandwidth is None else read_bandwidth
        return StatsReport(
            phases=tuple(filter(None, map(self._phase, PHASES))),
            ops=tuple(figure for phase in PHASES for figure in self._ops(phase, limit)),
            read_bandwidth=limit,
            read_bandwidth_by=by,
            threads=torch.get_num_threads(),
            guessed=self._engine.totals.guessed - self._guesses[0],
            accepted=self._engine.totals.accepted - self._guesses[1],
        )

    def _step(self, chunks: Sequence[Chunk], compute: Callable[[], StepFigures]) -> None:
        decode = all(chunk.decodes for chunk in chunks)
        self._decode_steps += decode
        # The second decode step is the first one looked into: the very first still warms caches.
        if decode and self._decode_steps % self._every != 2 % self._every:
            self._plain.add(*compute())
            return
        observer = self._observers["decode" if decode else "prefill"]
        observer.begin()
        for part in self._watched:
            part.observe(observer)
        try:
            tokens, decode, seconds = compute()
        finally:
            for part in self._watched:
                part.observe(None)
        self._observed.add(tokens, decode, observer.end(seconds))

    def _phase(self, phase: str) -> PhaseFigure | None:
        steps, tokens, seconds = _of(self._plain, phase)
        observed_steps, observed_tokens, observed_seconds = _of(self._observed, phase)
        only = steps == 0
        if only:
            steps, tokens, seconds = observed_steps, observed_tokens, observed_seconds
        if steps == 0:
            return None
        return PhaseFigure(phase, steps, tokens, seconds, tokens / seconds, observed_steps, only and phase == "decode")

    def _ops(self, phase: str, limit: float) -> list[OpFigure]:
        observer = self._observers[phase]
        total = sum(t.seconds for t in observer.totals.values())
        whole = max(_of(self._observed, phase)[2], total)
        if whole <= 0.0:
            return []
        figures = [
            OpFigure(
                phase,
                op,
                row,
                t.calls,
                t.seconds,
                t.seconds / whole,
                _rate(t.bytes, t.seconds) / 1e9,
                _rate(t.bytes, t.seconds) / limit,
                _rate(t.flops, t.seconds) / 1e9,
            )
            for (op, row), t in observer.totals.items()
        ]
        figures.sort(key=lambda f: -f.seconds)
        rest = whole - total
        return [*figures, OpFigure(phase, "engine", "", 0, rest, rest / whole, 0.0, 0.0, 0.0)]


class _Observer:
    """Times each call and adds up its declared work."""

    def __init__(self, device: torch.device) -> None:
        self.totals: dict[tuple[str, str], OpTotals] = {}
        self._timer = call_timer(device.type)
        self._readings: list[tuple[OpTotals, Any]] = []
        self._overhead = 0.0

    def begin(self) -> None:
        self._overhead = 0.0

    def call(
        self, op_id: str, row_name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        result, reading = self._timer.measure(fn, args, kwargs)
        started = now()
        totals = self.totals.setdefault((op_id, row_name), OpTotals())
        work = declared_work(op_id, row_name, args, kwargs, result)
        totals.calls += 1
        totals.bytes += work.read_bytes + work.write_bytes
        totals.flops += work.flops
        self._readings.append((totals, reading))
        self._overhead += now() - started
        return result

    def end(self, seconds: float) -> float:
        """Resolve the readings of a step that took `seconds`; returns them without the time spent in here."""
        for totals, reading in self._readings:
            totals.seconds += self._timer.seconds(reading)
        self._readings.clear()
        return seconds - self._overhead


def declared_work(op_id: str, row_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """The op's own `work(**arguments)`: read_bytes, write_bytes, flops. A packed weight counts as its original."""
    names, defaults, work = _signature(op_id)
    values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    values.pop("out", None)
    if op_id == "linear" and _packs(row_name):
        values["weight"] = _original(result.shape[-1], args[0].shape[-1], values["scheme"], args[0].dtype)
    return work(**values)


def _original(out_features: int, in_features: int, scheme: str, dtype: torch.dtype) -> torch.Tensor:
    """A weight of that scheme without memory of its own, for its sizes."""
    if scheme == "unquantized":
        return torch.empty((out_features, in_features), dtype=dtype, device="meta")
    return torch.empty((out_features, row_bytes(in_features, scheme)), dtype=torch.uint8, device="meta")


@cache
def _packs(row_name: str) -> bool:
    return any(row.name == row_name and row.prepack is not None for row in rows("linear"))


@cache
def _signature(op_id: str) -> tuple[list[str], dict[str, Any], Callable[..., Any]]:
    """An op's positional parameters, its defaults, and its `work`, which lies above the engine: found by name."""
    op = get_op(op_id)
    module, _, name = op.work.partition(":")
    names = [name for name, kind, _ in op.parsed.parameters() if kind == "pos"]
    defaults = {arg.name: arg.default for arg in op.parsed.args if arg.has_default}
    return names, defaults, getattr(importlib.import_module(module), name)


def measured_bandwidth(device: torch.device) -> tuple[float, str]:
    """Read bandwidth of `device`'s memory in bytes a second, and how it was measured."""
    if device.type == "cpu":
        found = importlib.import_module("rapid_llm.bench").read_bandwidth()
        return found.bytes_per_second, f"{found.by}, {found.threads} thread{'s'[: found.threads > 1]}"
    buffer = torch.ones(1 << 28, device=device)
    timer = call_timer("cuda")
    times = [timer.seconds(timer.measure(buffer.sum, (), {})[1]) for _ in range(8)]
    return buffer.nbytes / min(times[1:]), "sum over 1 GiB"


def _of(totals: StepTotals, phase: str) -> tuple[int, int, float]:
    if phase == "decode":
        return totals.decode_steps, totals.decode_tokens, totals.decode_seconds
    return totals.prefill_steps, totals.prefill_tokens, totals.prefill_seconds


def _rate(amount: int, seconds: float) -> float:
    return amount / seconds if seconds > 0.0 else 0.0
