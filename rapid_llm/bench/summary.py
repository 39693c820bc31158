"""Smallest, middle and largest of a list of samples. Nothing is trimmed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """min <= median <= max over `count` samples, in the samples' own unit."""

    count: int
    min: float
    median: float
    max: float

    @property
    def spread(self) -> float:
        """(max - min) / median; infinite where the median is 0."""
        return (self.max - self.min) / self.median if self.median else math.inf

    def json(self) -> dict[str, float]:
        return asdict(self)


def summarise(samples: Iterable[float]) -> Summary:
    """Summarise `samples`; raises `ValueError` on an empty list and on a value that is not finite."""
    values = [float(sample) for sample in samples]
    if not values:
        raise ValueError("no samples to summarise")
    bad = [value for value in values if not math.isfinite(value)]
    if bad:
        raise ValueError(f"{len(bad)} of {len(values)} samples are not finite, first: {bad[0]}")
    return Summary(len(values), min(values), statistics.median(values), max(values))
