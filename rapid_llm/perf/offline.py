"""Rounds of a case by every arm, and what they say: tokens a second with their spread, beside the roofline.

Arms take turns within a round, in the opposite order in the next, so that a drift of the machine hits all alike. Rounds
in which the device slowed itself down are dropped and counted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rapid_llm.bench.device import Device
from rapid_llm.bench.errors import BenchError, ThrottledError
from rapid_llm.bench.host import Clock
from rapid_llm.bench.stats import NOISY, Spread, drifts, spread

from .arms import OURS, Arm, Prompts
from .cases import Case
from .limits import Limits
from .needs import Needs

FEWEST: Final = 3
"""Rounds that are run whatever the time."""

DROPPED: Final = 0.5


@dataclass(frozen=True, slots=True)
class ArmResult:
    """samples: seconds of each round, in their order. dropped: rounds in which the device slowed itself down."""

    case: Case
    samples: tuple[float, ...]
    dropped: int = 0

    @property
    def seconds(self) -> Spread:
        return spread(self.samples)

    @property
    def flags(self) -> tuple[str, ...]:
        found = self.seconds
        flags = ["noisy"] if found.noise > NOISY else []
        return (*flags, *(["drifts"] if drifts(self.samples) else []))

    def json(self, needs: Needs, limits: Limits) -> dict[str, Any]:
        """Rates, and shares of what was measured and of what the maker says, at the median."""
        seconds, produced = self.seconds, self.case.produced
        limit, bound = limits.seconds(needs)
        nominal = limits.nominal_bytes_per_second
        reached = needs.bytes / seconds.median
        return {
            "tokens_per_second": {
                "median": produced / seconds.median,
                "p10": produced / seconds.p90,
                "p90": produced / seconds.p10,
            },
            "seconds_a_step": {
                "median": seconds.median / self.case.steps,
                "p10": seconds.p10 / self.case.steps,
                "p90": seconds.p90 / self.case.steps,
            },
            "bytes_per_second": reached,
            "share_of_bandwidth": reached / limits.bytes_per_second,
            "share_of_nominal_bandwidth": None if nominal is None else reached / nominal,
            "flops_per_second": needs.flops / seconds.median,
            "share_of_products": needs.flops / seconds.median / limits.flops_per_second,
            "share_of_roofline": limit / seconds.median,
            "bound": bound,
            "seconds": seconds.json(),
            "samples": list(self.samples),
            "dropped": self.dropped,
            "flags": list(self.flags),
        }


@dataclass(slots=True)
class CaseResult:
    """A case and what came of it. failure: why there are no figures, with its stable `code`. missing: arm -> why it has
    none. graphs: steps of ours by graph and call by call, in the timed rounds; None where the engine has no graphs."""

    case: Case
    needs: Needs
    arms: dict[str, ArmResult] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    graphs: dict[str, Any] | None = None
    code: str = ""
    failure: str = ""

    def ratios(self) -> dict[str, Spread]:
        """How many times faster ours was than each peer, round by round."""
        ours = self.arms.get(OURS)
        if ours is None:
            return {}
        return {
            name: spread(theirs / mine for mine, theirs in zip(ours.samples, result.samples, strict=True))
            for name, result in self.arms.items()
            if name != OURS
        }

    def json(self, limits: Limits) -> dict[str, Any]:
        record: dict[str, Any] = {**self.case.json(), "needs": self.needs.json()}
        if self.failure:
            return {**record, "failure": {"code": self.code, "reason": self.failure}}
        limit, bound = limits.seconds(self.needs)
        return {
            **record,
            "limit": {"seconds": limit, "tokens_per_second": self.case.produced / limit, "bound": bound},
            "arms": {name: result.json(self.needs, limits) for name, result in self.arms.items()},
            "faster_than": {name: ratio.json() for name, ratio in self.ratios().items()},
            "missing": self.missing,
            "graphs": self.graphs,
        }


def prompts_of(case: Case, vocab: int, seed: int, round_number: int) -> list[list[int]]:
    """Random ids. Those of a decode case are the same in every round, those of a prefill are always new."""
    where = "decode" if case.kind == "decode" else f"prefill {round_number}"
    drawn = random.Random(f"{seed} {case.batch} {case.context} {where}")
    return [drawn.choices(range(vocab), k=case.context) for _ in range(case.batch)]


def measure(
    case: Case,
    needs: Needs,
    arms: Sequence[Arm],
    limits: Limits,
    device: Device,
    *,
    prompts: Callable[[int], Prompts],
    rounds: int,
    max_seconds: float,
    graphs: Callable[[], Mapping[str, Any] | None] = lambda: None,
    clock: Clock = time.perf_counter_ns,
) -> CaseResult:
    """Run `case` on every arm for `rounds` rounds, fewer (but at least `FEWEST`) once `max_seconds` have passed.

    prompts: of a round, by its number; negative for warming up. graphs: the engine's counts so far. A peer that fails
    is missing, with its reason; where ours fails with a `BenchError` or out of memory, the case has none. Any other
    error is a fault and is raised.
    """
    result = CaseResult(case, needs)
    try:
        present = _warm(case, arms, prompts, result)
        before = graphs()
        taken, dropped = _rounds(case, present, device, prompts, rounds, max_seconds, clock)
        result.graphs = difference(before, graphs())
        for arm in present:
            result.arms[arm.name] = ArmResult(case, tuple(taken[arm.name]), dropped)
        ours = result.arms[OURS]
        limits.refuse_too_fast(case.title, needs, case.steps, ours.seconds.median)
    except Exception as error:
        if not (isinstance(error, BenchError) or out_of_memory(error)):
            raise
        result.arms.clear()
        result.code, result.failure = getattr(error, "code", "out_of_memory"), str(error).strip().splitlines()[0]
    finally:
        for arm in arms:
            arm.end(case)
    return result


def _warm(case: Case, arms: Sequence[Arm], prompts: Callable[[int], Prompts], result: CaseResult) -> list[Arm]:
    present = []
    for arm in arms:
        try:
            arm.ready(case, prompts(-1))
        except Exception as error:
            if arm.name == OURS:
                raise
            result.missing[arm.name] = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            )
            continue
        present.append(arm)
    return present


def _rounds(
    case: Case,
    arms: Sequence[Arm],
    device: Device,
    prompts: Callable[[int], Prompts],
    rounds: int,
    max_seconds: float,
    clock: Clock,
) -> tuple[dict[str, list[float]], int]:
    """Seconds of every arm in each round that counts, and how many rounds did not."""
    taken: dict[str, list[float]] = {arm.name: [] for arm in arms}
    start, dropped, done = clock(), 0, 0
    while done < rounds and (done < FEWEST or (clock() - start) / 1e9 < max_seconds):
        of_round, ids = {}, prompts(done)
        disturbed = device.clocks().disturbed
        for arm in arms if done % 2 == 0 else reversed(arms):
            of_round[arm.name] = arm.run(case, ids, done)
            disturbed = disturbed or device.clocks().disturbed
        done += 1
        if disturbed:
            dropped += 1
            continue
        for name, seconds in of_round.items():
            taken[name].append(seconds)
    if dropped > DROPPED * done:
        raise ThrottledError(
            f"{case.title}: in {dropped} of {done} rounds the device slowed itself down (thermal or power brake); let "
            "it cool, and look at its cooling and power supply"
        )
    return taken, dropped


def out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no room."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def difference(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Of two counts of an engine's graphs, what was added: steps by graph, and steps call by call for each reason."""
    if after is None:
        return None
    was: Mapping[str, Any] = before or {"graph_steps": 0, "eager_steps": {}}
    eager = {reason: n - was["eager_steps"].get(reason, 0) for reason, n in after["eager_steps"].items()}
    return {
        "graph_steps": after["graph_steps"] - was["graph_steps"],
        "eager_steps": {reason: n for reason, n in eager.items() if n},
        "refused": after["refused"],
    }
