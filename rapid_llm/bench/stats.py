"""From samples to a claim: order statistics only, nothing trimmed, no distribution assumed.

A verdict speaks only where the confidence interval of the ratio lies wholly on one side, and where the run's own
control (the same arm against itself) does not reach as far.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

MARGIN: Final = 0.02
"""Ratios nearer to 1 than this are no difference."""

CONFIDENCE: Final = 0.95
NOISY: Final = 0.10
"""(p90 - p10) / median above which a figure is labelled noisy."""

DRIFT: Final = 0.02
Verdict = Literal["FAST", "SLOW", "SAME", "UNDECIDED"]


@dataclass(frozen=True, slots=True)
class Spread:
    """min <= p10 <= median <= p90 <= max; low, high: the confidence interval of the median."""

    count: int
    min: float
    p10: float
    median: float
    p90: float
    max: float
    low: float
    high: float

    @property
    def noise(self) -> float:
        """(p90 - p10) / median; infinite where the median is 0."""
        return (self.p90 - self.p10) / self.median if self.median else math.inf

    def json(self) -> dict[str, Any]:
        return asdict(self)


def spread(samples: Iterable[float]) -> Spread:
    """Raises `ValueError` on an empty list and on a value that is not finite."""
    values = sorted(float(sample) for sample in samples)
    if not values:
        raise ValueError("no samples to summarise")
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"samples must be finite, got {next(v for v in values if not math.isfinite(v))}")
    low, high = median_interval(values)
    ends = (values[0], quantile(values, 0.1), statistics.median(values), quantile(values, 0.9), values[-1])
    return Spread(len(values), *ends, low, high)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the neighbours; never outside of them."""
    at = share * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    value = ordered[below] + (ordered[above] - ordered[below]) * (at - below)
    return min(max(value, ordered[below]), ordered[above])


def median_interval(ordered: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The narrowest pair of order statistics, symmetric in rank, that holds the median with `confidence`; the extremes
    where there are too few samples for it (fewer than 6 at 95 %)."""
    n = len(ordered)
    outside, below = 0.0, 0
    for rank in range(n // 2):
        outside += 2 * math.comb(n, rank) / 2**n
        if outside > 1 - confidence:
            break
        below = rank
    return ordered[below], ordered[n - 1 - below]


def verdict(ratio: Spread, control: Spread, margin: float = MARGIN) -> Verdict:
    """`ratio`: time of the arm over time of the baseline. FAST is wholly below 1 - margin, SLOW wholly above
    1 + margin, SAME wholly between; what the control's own interval reaches beyond 1 is added to the margin."""
    reach = margin + max(control.high - 1, 1 - control.low, 0.0)
    if ratio.high < 1 - reach:
        return "FAST"
    if ratio.low > 1 + reach:
        return "SLOW"
    if ratio.low >= 1 - margin and ratio.high <= 1 + margin and reach < 2 * margin:
        return "SAME"
    return "UNDECIDED"


def drifts(samples: Sequence[float]) -> bool:
    """Whether the samples rise or fall with their index: rank correlation above chance, and the last third differs
    from the first by more than `DRIFT`."""
    n = len(samples)
    if n < 9:
        return False
    ranks = {index: rank for rank, index in enumerate(sorted(range(n), key=lambda i: samples[i]))}
    squares = sum((ranks[i] - i) ** 2 for i in range(n))
    rho = 1 - 6 * squares / (n * (n * n - 1))
    third = n // 3
    first, last = statistics.median(samples[:third]), statistics.median(samples[-third:])
    return abs(rho) > 2.6 / math.sqrt(n - 1) and first > 0 and abs(last / first - 1) > DRIFT


def pair_ratios(arm: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Ratios of the sums of two neighbouring rounds, which ran in opposite order: a steady drift cancels."""
    if len(arm) != len(baseline) or len(arm) % 2:
        raise ValueError(f"{len(arm)} and {len(baseline)} samples: both arms need the same, even number")
    return [(arm[i] + arm[i + 1]) / (baseline[i] + baseline[i + 1]) for i in range(0, len(arm), 2)]
