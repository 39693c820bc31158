"""Requests that arrive by chance, what became of each, and the figures of them all.

Arrivals are Poisson and planned beforehand, from a seed: a server that falls behind is not spared, for requests come
whether or not others are done, and each one's wait counts from the moment at which it was due.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rapid_llm.bench.stats import quantile

LATE_S: Final = 0.01
"""A client that sends its requests so much too late, at the 99th percentile, measures itself."""

FIRST_ID: Final = 3
IDS: Final = 1000
"""Prompts are of ids from the first on, so many: every vocabulary has them, and none of the first few is a word."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """rate: requests a second, infinite for all at once. ttft_slo, itl_slo: seconds that the first token may take, and
    each later one on the mean of its request; None for no limit."""

    rate: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    ttft_slo: float | None = None
    itl_slo: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"--rate {self.rate:g}: requests a second are above 0; inf sends all at once")
        for name in ("requests", "prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: use 1 or more")
        for name in ("ttft_slo", "itl_slo"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"--{name.replace('_', '-')} {value:g}: use seconds above 0")

    def arrivals(self) -> list[float]:
        """Seconds from the start at which each request is due, in order."""
        drawn, at, found = random.Random(f"arrivals {self.seed}"), 0.0, []
        for _ in range(self.requests):
            found.append(at)
            at += drawn.expovariate(self.rate) if math.isfinite(self.rate) else 0.0
        return found

    def prompt(self, number: int) -> list[int]:
        """Token ids of a request; no two begin alike, so that no cache of prefixes helps. Negative ones warm up."""
        drawn = random.Random(f"prompt {self.seed} {self.rate} {number}")
        return drawn.choices(range(FIRST_ID, FIRST_ID + IDS), k=self.prompt_tokens)


@dataclass(slots=True)
class Answer:
    """Seconds on the client's clock. due: by plan. sent: when the request was begun. times: of each event that held
    text. tokens: as the server counts them, 0 if it does not. error: why it failed."""

    due: float
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""

    @property
    def good(self) -> bool:
        return not self.error and bool(self.times)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.due

    @property
    def output(self) -> int:
        """Tokens: the server's count, or that of the events."""
        return self.tokens or len(self.times)

    @property
    def tpot(self) -> float | None:
        """Seconds a token behind the first, on the mean; None where there is none."""
        later = self.output - 1
        return (self.times[-1] - self.times[0]) / later if later > 0 else None

    def meets(self, traffic: Traffic) -> bool:
        if not self.good or (traffic.ttft_slo is not None and self.ttft > traffic.ttft_slo):
            return False
        return traffic.itl_slo is None or self.tpot is None or self.tpot <= traffic.itl_slo


def figures(traffic: Traffic, answers: Sequence[Answer], start: float) -> dict[str, Any]:
    """Everything that is said of one rate. start: of the plan, on the clock of the answers."""
    good = [answer for answer in answers if answer.good]
    ends = [answer.times[-1] for answer in good]
    seconds = max(ends, default=start) - start
    gaps = [b - a for answer in good for a, b in zip(answer.times, answer.times[1:], strict=False)]
    late = [answer.sent - answer.due for answer in answers]
    events = sum(len(answer.times) for answer in good)
    errors = Counter(answer.error or "no text came" for answer in answers if not answer.good)
    meeting = sum(answer.meets(traffic) for answer in answers)
    return {
        "rate": traffic.rate if math.isfinite(traffic.rate) else "inf",
        "requests": traffic.requests,
        "completed": len(good),
        "errors": dict(errors),
        "seconds": seconds,
        "requests_per_second": _rate(len(good), seconds),
        "output_tokens_per_second": _rate(sum(answer.output for answer in good), seconds),
        "prompt_tokens_per_second": _rate(len(good) * traffic.prompt_tokens, seconds),
        "ttft_seconds": _percentiles([answer.ttft for answer in good]),
        "itl_seconds": _percentiles(gaps),
        "tpot_seconds": _percentiles([tpot for answer in good if (tpot := answer.tpot) is not None]),
        "tokens_an_event": _rate(sum(answer.output for answer in good), events),
        "slo": {"ttft_seconds": traffic.ttft_slo, "itl_seconds": traffic.itl_slo},
        "goodput_requests_per_second": _rate(meeting, seconds),
        "share_within_slo": meeting / len(answers),
        "concurrency": _rate(sum(answer.times[-1] - answer.due for answer in good), seconds),
        "late_seconds": _percentiles(late),
        "flags": _flags(late, good, events),
    }


def _flags(late: Sequence[float], good: Sequence[Answer], events: int) -> list[str]:
    found = []
    if late and quantile(sorted(late), 0.99) > LATE_S:
        found.append("late client")
    if sum(answer.output for answer in good) > 1.05 * events:
        found.append("several tokens an event")
    return found


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    ordered = sorted(values)
    if not ordered:
        return None
    named = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {
        "mean": sum(ordered) / len(ordered),
        **{name: quantile(ordered, share) for name, share in named.items()},
        "max": ordered[-1],
    }
