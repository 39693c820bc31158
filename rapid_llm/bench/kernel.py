"""`bench` and `bench_stateful`: the time of one call of a kernel, cold unless said otherwise, or a refusal.

A figure stands only for a function that was right before, while and after it was timed, whose work is declared, and
that is not faster than the device can be.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .calibration import COLD_RATIO, TOLERANCE, calibrate
from .device import Device, device_for
from .errors import ThrottledError, TooFastError
from .host import Clock
from .identity import refuse_wrong_row
from .rotation import Plan, Rotation, plan
from .stats import NOISY, Spread, drifts, spread
from .storages import Arguments, bind, tensors
from .trial import Check, RowArm, Sample, Trial, prepare
from .work import Work, amount_text, rate, seconds_text, work_of

SAMPLES: Final = 20
FEWEST: Final = 7
"""Samples, or pairs of rounds, below which there is no interval to speak of; taken whatever the estimate says."""

DROPPED: Final = 0.5
FLOORS: Final = 3
OVERLAP: Final = 0.10


@dataclass(frozen=True, slots=True)
class KernelResult:
    """Seconds a call of one arm, and everything that a reader needs to judge them."""

    name: str
    row: str | None
    forced: bool
    device: str
    dtype: str
    work: Work
    seconds: Spread
    samples: tuple[float, ...]
    dropped: int
    floor_seconds: float
    isolated_seconds: float | None
    plan: Plan
    cold: bool
    graph: bool
    launches_a_call: float | None
    ceiling: float | None
    clocks: tuple[dict[str, Any], ...]
    flags: tuple[str, ...]

    @property
    def label(self) -> str:
        return "cold" if self.cold else "warm"

    @property
    def floor_limited(self) -> bool:
        """Within three times what doing nothing costs: such a result ranks nothing."""
        return "floor-limited" in self.flags

    @property
    def bytes_per_second(self) -> float | None:
        """None where warm, for those bytes do not come from memory."""
        return rate(self.work.bytes, self.seconds.median) if self.cold and self.work.bytes else None

    @property
    def flops_per_second(self) -> float | None:
        return rate(self.work.flops, self.seconds.median) if self.work.flops else None

    @property
    def share(self) -> float | None:
        """Of the memory ceiling that was measured in this run."""
        return self.bytes_per_second / self.ceiling if self.bytes_per_second and self.ceiling else None

    def json(self) -> dict[str, Any]:
        """Raw samples included; rates in decimal units."""
        record: dict[str, Any] = {
            "name": self.name,
            "row": self.row,
            "forced": self.forced,
            "device": self.device,
            "dtype": self.dtype,
            "label": self.label,
            "graph": self.graph,
            "work": self.work.json(),
            "seconds": self.seconds.json(),
            "samples": list(self.samples),
            "dropped": self.dropped,
            "floor_seconds": self.floor_seconds,
            "isolated_seconds": self.isolated_seconds,
            "launches_a_call": self.launches_a_call,
            "bytes_per_second": self.bytes_per_second,
            "flops_per_second": self.flops_per_second,
            "share_of_ceiling": self.share,
            "plan": self.plan.json(),
            "clocks": list(self.clocks),
            "flags": list(self.flags),
        }
        return record

    def __str__(self) -> str:
        parts = [f"{self.name}: {seconds_text(self.seconds.median)} {self.label}"]
        parts.append(f"[{seconds_text(self.seconds.p10)} to {seconds_text(self.seconds.p90)}]")
        if self.bytes_per_second:
            parts.append(amount_text(self.bytes_per_second, "B/s"))
        if self.flops_per_second:
            parts.append(amount_text(self.flops_per_second, "FLOP/s"))
        return " ".join([*parts, *self.flags])


def bench(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    work: Any,
    check: Check | None,
    device: Any = None,
    name: str | None = None,
    row: str | None = None,
    forced: bool = False,
    out: Any = None,
    mutated: Sequence[int | str] = (),
    reset: Callable[..., object] | None = None,
    adapt: Callable[[Arguments], Arguments] | None = None,
    graph: bool | None = None,
    cold: bool = True,
    samples: int = SAMPLES,
    max_seconds: float = 3.0,
    clock: Clock = time.perf_counter_ns,
) -> KernelResult:
    """Time `fn(*args, **kwargs)` for calls that leave their arguments as they are (see `bench_stateful` for others).

    work: a `Work`, or anything with read_bytes, write_bytes and flops. check: see `trial.Check`; made of an op by
    `checks.against_oracle`. device: by default that of the first tensor. name: for messages; a registered row's name
    claims that `fn` is that row. out: a tensor like the one that `fn` takes as `out`. Other arguments: see
    `trial.RowArm`. samples: blocks that are timed; fewer, but at least 7, once `max_seconds` are spent. Raises a
    `BenchError` with the reason wherever the figure could not be trusted.
    """
    given = work_of(work)
    arguments = bind(args, kwargs)
    arm = RowArm(name or _name(fn), fn, out, tuple(mutated), reset, adapt, None, row, forced, graph)
    found = device_for(device if device is not None else _device(arguments))
    trial = ready(arm, arguments, given, check, found, cold=cold)
    taken = take([trial], max(samples, FEWEST), max_seconds, clock)[0]
    return conclude(trial, taken, given)


def bench_stateful(
    fn: Callable[..., Any],
    reset: Callable[..., object],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mutated: Sequence[int | str],
    **options: Any,
) -> KernelResult:
    """Time calls that change `mutated`, keys of their arguments. Every copy is called once in a block, and put back
    before the next one, outside of the timed window: its arguments to the values that were given, then by
    `reset(*args, **kwargs)` what else the call changes. Options as of `bench`."""
    if not mutated:
        raise ValueError("bench_stateful: mutated is empty; name the arguments that a call changes, or use bench")
    return bench(fn, args, kwargs, mutated=mutated, reset=reset, **options)


def ready(
    arm: RowArm,
    arguments: Arguments,
    work: Work,
    check: Check | None,
    device: Device,
    *,
    cold: bool,
    rotation: Rotation | None = None,
) -> Trial:
    """A trial that is proven and loaded with its plan; for one arm alone."""
    refuse_wrong_row(arm, arguments)
    trial = prepare(arm, arguments, check, device, rotation)
    seconds = trial.probe()
    trial.load(plan_for([trial], work, seconds, cold=cold))
    return trial


def plan_for(trials: Sequence[Trial], work: Work, seconds: float, *, cold: bool) -> Plan:
    """The plan that all of `trials`, which share a rotation, run by."""
    device, rotation = trials[0].device, trials[0].rotation
    outs = sum(t.arm.out.numel() * t.arm.out.element_size() for t in trials if t.arm.out is not None)
    found = min(work.reads, rotation.set_bytes) if work.reads else rotation.set_bytes
    return plan(
        read_bytes=found,
        set_bytes=rotation.set_bytes + outs,
        cache_bytes=device.cache_bytes,
        budget_bytes=device.budget_bytes(),
        seconds_a_call=seconds,
        block_seconds=device.block_seconds,
        max_copies=device.max_copies,
        cold=cold,
        once=any(t.arm.mutated for t in trials),
    )


def take(trials: Sequence[Trial], rounds: int, max_seconds: float, clock: Clock) -> list[list[Sample]]:
    """Samples of every trial: round after round, each in the opposite order of the one before (A B, B A). At least
    `FEWEST`, pairs of rounds where there are several trials; none is begun after `max_seconds`. A first round is not
    counted: the device may have idled while results were checked."""
    for trial in trials:
        trial.sample()
    taken: list[list[Sample]] = [[] for _ in trials]
    step = 1 if len(trials) == 1 else 2
    start, done = clock(), 0
    while done < rounds and (done < step * FEWEST or (clock() - start) / 1e9 < max_seconds):
        for turn in range(step):
            order: Iterable[int] = range(len(trials)) if turn == 0 else reversed(range(len(trials)))
            for index in order:
                taken[index].append(trials[index].sample())
        done += step
    return taken


def conclude(trial: Trial, taken: Sequence[Sample], work: Work) -> KernelResult:
    """The result of a trial after its last sample; every refusal that needs the figures is made here."""
    arm, device = trial.arm, trial.device
    calm = [s for s in taken if not s.clocks.disturbed]
    dropped = len(taken) - len(calm)
    if dropped > DROPPED * len(taken):
        raise ThrottledError(
            f"{arm.name}: {dropped} of {len(taken)} samples were taken while the device slowed itself down (thermal or "
            "power brake); let it cool, and look at its cooling and power supply"
        )
    trial.finish(calm)
    good = [s.seconds for s in calm if s.good]
    figures = spread(good)
    if trial.plan is None:
        raise ValueError(f"{arm.name}: no plan was loaded")
    calibration = calibrate(device)
    cold = trial.plan.cold and calibration.ratio >= COLD_RATIO
    refuse_too_fast(trial, work, figures.median, cold)
    calls = len(trial.plan.order)
    stamps = [s.clocks.json() for s in taken if s.clocks.sm_mhz is not None]
    return KernelResult(
        name=arm.name,
        row=arm.row,
        forced=arm.forced,
        device=device.name,
        dtype=dtype_of(trial.rotation.masters[0]),
        work=work,
        seconds=figures,
        samples=tuple(good),
        dropped=len(taken) - len(good),
        floor_seconds=trial.floor_seconds,
        isolated_seconds=trial.isolated,
        plan=trial.plan,
        cold=cold,
        graph=trial.graph,
        launches_a_call=None if trial.launches is None else trial.launches / calls,
        ceiling=calibration.bytes_per_second,
        clocks=tuple(stamps),
        flags=_flags(trial, taken, figures),
    )


def _flags(trial: Trial, taken: Sequence[Sample], figures: Spread) -> tuple[str, ...]:
    flags = []
    if figures.median < FLOORS * trial.floor_seconds:
        flags.append("floor-limited")
    if figures.noise > NOISY:
        flags.append("noisy")
    if drifts([s.seconds for s in taken]):
        flags.append("drifts")
    if any(s.clocks.capped for s in taken):
        flags.append("power-capped")
    if any(s.host_bound for s in taken):
        flags.append("host-bound")
    if trial.device.kind == "cuda" and not trial.graph:
        flags.append("queued")
    alone = trial.isolated
    if alone is not None and alone - figures.median > max(OVERLAP * alone, trial.floor_seconds):
        flags.append("overlaps")
    return tuple(flags)


def refuse_too_fast(trial: Trial, work: Work, seconds: float, cold: bool) -> None:
    """Raise `TooFastError` above the nominal peak, or where that is unknown above the ceiling measured here."""
    device, name = trial.device, trial.arm.name
    if cold and work.bytes:
        reached, limit, source = rate(work.bytes, seconds), device.peaks.bytes_per_second, device.peaks.source
        if limit is None:
            slack = TOLERANCE.get(device.kind, 1.05)
            limit, source = calibrate(device).bytes_per_second * slack, "measured here"
            if reached > limit and device.kind == "cpu":  # a neighbour may have been busy then
                limit = calibrate(device, again=True).bytes_per_second * slack
        _refuse_above(name, reached, limit, "B/s", source)
    if work.flops:
        label = work.dtype or dtype_of(trial.rotation.masters[0])
        peak = device.peaks.flops.get(label)
        if peak is not None:
            _refuse_above(name, rate(work.flops, seconds), peak, "FLOP/s", f"{label}, {device.peaks.source}")


def _refuse_above(name: str, reached: float, limit: float, unit: str, source: str) -> None:
    if reached > limit:
        raise TooFastError(
            f"{name}: {amount_text(reached, unit)} is above {amount_text(limit, unit)} ({source}); the call does less "
            "than the declared work, or the work is declared wrong"
        )


def dtype_of(arguments: Arguments) -> str:
    """Label of the first tensor of numbers."""
    from rapid_llm.kernels.registry.spec import dtype_label

    found = [t.dtype for _, t in tensors(arguments)]
    chosen = next((d for d in found if d.is_floating_point), found[0] if found else "fp32")
    return dtype_label(chosen)


def _device(arguments: Arguments) -> str:
    found = next((t.device for _, t in tensors(arguments)), None)
    return "cpu" if found is None else str(found)


def _name(fn: Callable[..., Any]) -> str:
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return getattr(inner, "__name__", None) or type(inner).__name__
