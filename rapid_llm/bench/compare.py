"""Interleaved comparison of named arms: every round runs each arm once, so that drift of the machine hits all alike.

Rounds alternate their direction (A B, then B A), ratios are taken within a round, and the baseline runs a second time
as its own control: what it gains over itself is the noise of the run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import ResolutionError
from .host import Clock
from .summary import Summary, summarise

AGAIN = " (again)"
"""Suffix of the baseline's second arm."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to do the work. `setup`, if given, runs untimed before each round and its result is passed to `run`.

    units: how much work one run is (tokens, say), for rates.
    """

    name: str
    run: Callable[..., object]
    setup: Callable[[], object] | None = None
    units: float = 1.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of every arm in every round, and what follows from them."""

    baseline: str
    seconds: dict[str, tuple[float, ...]]
    units: dict[str, float] = field(default_factory=dict)

    def time(self, name: str) -> Summary:
        """Seconds a run."""
        return summarise(self.seconds[name])

    def rate(self, name: str) -> Summary:
        """Units a second."""
        return summarise(self.units[name] / second for second in self.seconds[name])

    def speedups(self, name: str, over: Sequence[str] | None = None) -> tuple[float, ...]:
        """Per round: how many times faster `name` is, per unit of work, than the fastest of `over` (the baseline)."""
        rivals = (self.baseline,) if over is None else tuple(over)
        if not rivals:
            raise ValueError("over: name at least one arm to compare with")
        return tuple(
            min(self.seconds[rival][i] / self.units[rival] for rival in rivals) / (mine / self.units[name])
            for i, mine in enumerate(self.seconds[name])
        )

    def speedup(self, name: str, over: Sequence[str] | None = None) -> Summary:
        return summarise(self.speedups(name, over))

    @property
    def control(self) -> Summary:
        """The baseline against itself: the distance of min and max from 1 is the noise of this run."""
        return self.speedup(self.baseline + AGAIN)

    def verdict(self, name: str) -> str:
        """`faster` or `slower` than the baseline if every round lies beyond all of the control's, else `undecided`."""
        ours, noise = self.speedup(name), self.control
        if ours.min > max(noise.max, 1.0):
            return "faster"
        if ours.max < min(noise.min, 1.0):
            return "slower"
        return "undecided"

    def json(self) -> dict[str, Any]:
        return {
            "baseline": self.baseline,
            "arms": {
                name: {
                    "units": self.units[name],
                    "seconds": list(self.seconds[name]),
                    "speedup_over_baseline": self.speedup(name).json(),
                }
                for name in self.seconds
            },
        }


def compare_arms(
    arms: Sequence[Arm],
    *,
    baseline: str,
    rounds: int = 8,
    warmup: int = 1,
    clock: Clock = time.perf_counter_ns,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Run all `arms` in `rounds` interleaved rounds after `warmup` untimed ones.

    baseline: name of the arm that the others are compared with; it runs twice a round. progress: called as
    progress(rounds done, rounds in all). The garbage collector is off inside a timed run. Raises `ValueError` on bad
    arguments, `ResolutionError` if a run took no time, and whatever an arm raises.
    """
    by_name = {arm.name: arm for arm in arms}
    if len(by_name) != len(arms):
        raise ValueError(f"arms: names must differ, got {[arm.name for arm in arms]}")
    if baseline not in by_name:
        raise ValueError(f"baseline={baseline!r} is not an arm; arms: {', '.join(by_name)}")
    if rounds < 3:
        raise ValueError(f"rounds={rounds}: at least 3")
    first = by_name[baseline]
    order = [*arms, Arm(baseline + AGAIN, first.run, first.setup, first.units)]
    for _ in range(warmup):
        for arm in arms:
            _run(arm, clock)
    seconds: dict[str, list[float]] = {arm.name: [] for arm in order}
    for done in range(rounds):
        for arm in order if done % 2 == 0 else reversed(order):
            spent = _run(arm, clock)
            if spent <= 0:
                raise ResolutionError(f"arm {arm.name!r} took no time by this clock; let one run do more")
            seconds[arm.name].append(spent)
        if progress is not None:
            progress(done + 1, rounds)
    return Comparison(baseline, {k: tuple(v) for k, v in seconds.items()}, {arm.name: arm.units for arm in order})


def _run(arm: Arm, clock: Clock) -> float:
    """Seconds of one run; setup and garbage collection stay outside."""
    state = () if arm.setup is None else (arm.setup(),)
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        start = clock()
        arm.run(*state)
        return (clock() - start) / 1e9
    finally:
        if was_on:
            gc.enable()
