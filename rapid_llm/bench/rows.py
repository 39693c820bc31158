"""`compare`: several functions for the same arguments, interleaved, with a verdict on each against a baseline.

Rounds alternate their direction (A B A', then A' B A), a ratio is taken over each pair of rounds, and the baseline runs
a second time in a block of its own: what it seems to gain over itself is the noise that a verdict must exceed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .compare import AGAIN
from .device import Device, device_for
from .errors import BenchError, MixedColdError, ThrottledError
from .host import Clock
from .identity import refuse_wrong_row
from .inputs import refuse_degenerate
from .kernel import FEWEST, KernelResult, _device, conclude, plan_for, take
from .rotation import Rotation
from .stats import MARGIN, Spread, Verdict, pair_ratios, spread, verdict
from .storages import Arguments, bind
from .trial import Check, RowArm, Sample, Trial, prepare
from .work import Work, work_of

ROUNDS = 40


@dataclass(frozen=True, slots=True)
class RowComparison:
    """results: of every arm that was measured. ratios: time over the baseline's, smaller is faster. control: the
    baseline over itself. refused: why the others have no figures. dropped: pairs of rounds left out as disturbed."""

    baseline: str
    results: dict[str, KernelResult]
    ratios: dict[str, Spread]
    control: Spread
    refused: dict[str, BenchError] = field(default_factory=dict)
    margin: float = MARGIN
    dropped: int = 0

    def verdict(self, name: str) -> Verdict:
        """FAST, SLOW or SAME against the baseline, or UNDECIDED; also UNDECIDED where both are floor-limited, for then
        it is the floor that is compared."""
        if self.results[name].floor_limited and self.results[self.baseline].floor_limited:
            return "UNDECIDED"
        return verdict(self.ratios[name], self.control, self.margin)

    def choose(self, present: str) -> str:
        """The arm to use: the fastest by its median of those that are FAST against `present`, which is kept in a near
        tie. `present` must be the baseline, or the claim would rest on a ratio that was not measured."""
        if present != self.baseline:
            raise ValueError(f"present={present!r}: the ratios are against {self.baseline!r}; compare again with it")
        better = [name for name in self.results if name != present and self.verdict(name) == "FAST"]
        return min(better, key=lambda name: self.ratios[name].median, default=present)

    def json(self) -> dict[str, Any]:
        return {
            "baseline": self.baseline,
            "margin": self.margin,
            "dropped_pairs": self.dropped,
            "control": self.control.json(),
            "arms": {
                name: {**result.json(), "ratio": self.ratios[name].json(), "verdict": self.verdict(name)}
                for name, result in self.results.items()
            },
            "refused": {name: {"code": e.code, "reason": str(e)} for name, e in self.refused.items()},
        }


def compare(
    rows: Mapping[str, Callable[..., Any]] | Sequence[RowArm],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    work: Any,
    check: Check | None,
    baseline: str | None = None,
    out: Any = None,
    device: Any = None,
    cold: bool = True,
    rounds: int = ROUNDS,
    max_seconds: float = 5.0,
    margin: float = MARGIN,
    clock: Clock = time.perf_counter_ns,
) -> RowComparison:
    """Time all `rows`, name -> function of the same arguments, or `RowArm`s where they differ in form.

    baseline: by default the first. out: for functions that take it. Other arguments as of `bench`. A row that is
    refused is listed with its reason and has no figure; where the baseline is refused, that is raised. Raises
    `MixedColdError` if some arms can only be measured warm.
    """
    arms = list(rows) if not isinstance(rows, Mapping) else [RowArm(name, fn, out) for name, fn in rows.items()]
    first = baseline if baseline is not None else arms[0].name if arms else None
    order = {arm.name: arm for arm in arms}
    if first not in order or len(order) != len(arms):
        raise ValueError(f"arms {[arm.name for arm in arms]}: names must differ, and baseline={baseline!r} be one")
    given, arguments = work_of(work), bind(args, kwargs)
    found = device_for(device if device is not None else _device(arguments))
    refused: dict[str, BenchError] = {}
    trials = _trials(order, first, arguments, check, found, given, cold, refused)
    names = [trial.arm.name for trial in trials]
    labels = {trial.arm.name: trial.plan.label for trial in trials if trial.plan is not None}
    if len(set(labels.values())) > 1:
        raise MixedColdError(f"some arms would be measured cold and others warm: {labels}; use smaller arguments")
    taken = take(trials, max(rounds, 2 * FEWEST), max_seconds, clock)
    dropped = _drop_disturbed(taken)
    results: dict[str, KernelResult] = {}
    for name, trial, samples in zip(names, trials, taken, strict=True):
        try:
            results[name] = conclude(trial, samples, given)
        except BenchError as error:
            if name in (first, first + AGAIN):
                raise
            refused[name] = error
    seconds = {name: [s.seconds for s in samples] for name, samples in zip(names, taken, strict=True)}
    ratios = {name: spread(pair_ratios(seconds[name], seconds[first])) for name in results}
    control = ratios.pop(first + AGAIN)
    del results[first + AGAIN]
    return RowComparison(first, results, ratios, control, refused, margin, dropped)


def _trials(
    arms: Mapping[str, RowArm],
    first: str,
    arguments: Arguments,
    check: Check | None,
    device: Device,
    work: Work,
    cold: bool,
    refused: dict[str, BenchError],
) -> list[Trial]:
    """Proven trials of every arm that is not refused, the baseline's second one last. Arms that take the arguments as
    they are share their copies, and so run by one plan."""
    refuse_degenerate(arguments, first)
    shared: dict[tuple[int | str, ...], Rotation] = {}
    trials: list[Trial] = []
    seconds: dict[int, float] = {}
    again = replace(arms[first], name=first + AGAIN, row=None)
    for arm in (*arms.values(), again):
        try:
            refuse_wrong_row(arm, arguments)
            rotation = shared.get(arm.mutated) if arm.adapt is None else None
            trial = prepare(arm, arguments, check, device, rotation)
            if arm.adapt is None:
                shared[arm.mutated] = trial.rotation
            took = trial.probe()
        except BenchError as error:
            if arm.name in (first, again.name):
                raise
            refused[arm.name] = error
            continue
        trials.append(trial)
        key = id(trial.rotation)
        seconds[key] = min(took, seconds.get(key, took))
    plans = {
        key: plan_for([t for t in trials if id(t.rotation) == key], work, took, cold=cold)
        for key, took in seconds.items()
    }
    loaded = []
    for trial in trials:
        try:
            trial.load(plans[id(trial.rotation)])
        except BenchError as error:
            if trial.arm.name in (first, again.name):
                raise
            refused[trial.arm.name] = error
            continue
        loaded.append(trial)
    return loaded


def _drop_disturbed(taken: list[list[Sample]]) -> int:
    """Leave out, for every arm, each pair of rounds in which any arm was disturbed, at most half of them; how many."""
    pairs = range(0, len(taken[0]), 2)
    bad = [at for at in pairs if not all(s.good for samples in taken for s in samples[at : at + 2])]
    if len(bad) * 2 > len(pairs):
        disturbed = sum(s.clocks.disturbed for samples in taken for s in samples)
        if disturbed:
            raise ThrottledError(
                f"{len(bad)} of {len(pairs)} pairs of rounds were disturbed ({disturbed} samples while the device "
                "slowed itself down); let it cool, and look at its cooling and power supply"
            )
        return 0  # the host was too slow for some arm, and that arm says so
    for at in reversed(bad):
        for samples in taken:
            del samples[at : at + 2]
    return len(bad)
