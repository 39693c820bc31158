"""From samples to verdicts, on synthetic series: noise and drift must not become differences, and differences must."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.bench.rows import ROUNDS
from rapid_llm.bench.stats import drifts, median_interval, pair_ratios, quantile, spread, verdict

FLOATS = st.floats(1e-9, 1e3)


def _series(rng: random.Random, cost: float, noise: float, drift: Callable[[int], float], start: int, arms: int):
    """Seconds of one arm whose place in each round alternates, among `arms` arms."""
    values = []
    for at in range(ROUNDS):
        place = start if at % 2 == 0 else arms - 1 - start
        spike = 1 + (rng.expovariate(4) if rng.random() < 0.03 else 0)
        values.append(cost * drift(at * arms + place) * (1 + rng.gauss(0, noise)) * spike)
    return values


def _judge(rng: random.Random, cost: float, noise: float, drift: Callable[[int], float]) -> str:
    """The verdict on an arm of `cost` against a baseline of 1, with the baseline's second arm as control."""
    base, arm, again = (_series(rng, c, noise, drift, i, 3) for i, c in enumerate((1.0, cost, 1.0)))
    return verdict(spread(pair_ratios(arm, base)), spread(pair_ratios(again, base)))


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.03])
def test_equal_arms_are_never_called_fast_or_slow(noise: float) -> None:
    """Catches B29: noise taken for a difference; 40 tries, as a GPU has to stand, five times over."""
    rng = random.Random(7)
    words = [_judge(rng, 1.0, noise, lambda at: 1.0) for _ in range(200)]
    assert not {"FAST", "SLOW"} & set(words)
    if noise <= 0.002:
        assert words.count("SAME") > 190


def test_a_ramp_makes_no_difference() -> None:
    """Catches B29: the later arm called slower because the device slows down, by 0.2 % a block."""
    rng = random.Random(3)
    words = [_judge(rng, 1.0, 0.003, lambda at: 1 + 0.002 * at) for _ in range(200)]
    assert not {"FAST", "SLOW"} & set(words)


@pytest.mark.parametrize(("cost", "word"), [(0.9, "FAST"), (1.12, "SLOW"), (1.005, "SAME"), (0.995, "SAME")])
def test_real_differences_are_seen(cost: float, word: str) -> None:
    """Catches: a verdict that is always UNDECIDED, upside down, or blind to the margin; with a ramp below."""
    rng = random.Random(5)
    words = [_judge(rng, cost, 0.003, lambda at: 1 + 0.001 * at) for _ in range(50)]
    assert words.count(word) >= 48
    assert not ({"FAST", "SLOW"} - {word}) & set(words)


def test_same_needs_the_whole_interval_inside() -> None:
    """Catches: SAME said of an interval that reaches beyond the margin, and of a run whose control does."""
    calm = spread([0.999, 1.0, 1.001])
    assert verdict(spread([0.985, 1.0, 1.015]), calm) == "SAME"
    assert verdict(spread([0.985, 1.0, 1.025]), calm) == "UNDECIDED"
    assert verdict(spread([0.985, 1.0, 1.015]), spread([0.9, 1.0, 1.1])) == "UNDECIDED"


def test_the_control_widens_the_margin() -> None:
    """Catches: FAST said where the baseline gains as much over itself."""
    arm = spread([0.95, 0.95, 0.95])
    assert verdict(arm, spread([1.0, 1.0, 1.0])) == "FAST"
    assert verdict(arm, spread([0.96, 0.97, 0.98])) == "UNDECIDED"


@settings(deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=60))
def test_order_of_the_statistics(values: list[float]) -> None:
    """Catches B30: a minimum that is the maximum, quantiles out of order, samples trimmed in silence."""
    found = spread(values)
    assert found.min <= found.p10 <= found.median <= found.p90 <= found.max
    assert found.min <= found.low <= found.median <= found.high <= found.max
    assert (found.min, found.max, found.count) == (min(values), max(values), len(values))


def test_the_interval_covers_the_median() -> None:
    """Catches: an interval that is too narrow: it must hold the true median in 95 of 100 runs."""
    rng = random.Random(11)
    held = 0
    for _ in range(1000):
        low, high = median_interval(sorted(rng.gauss(0, 1) for _ in range(15)))
        held += low <= 0 <= high
    assert held >= 945
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == (1.0, 5.0)
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0


def test_drift_is_flagged() -> None:
    """Catches B19: a device that slows down over the samples and nobody says so; and noise taken for drift."""
    rng = random.Random(2)
    flat = [1 + rng.gauss(0, 0.01) for _ in range(30)]
    assert not drifts(flat)
    assert drifts([value * (1 + 0.005 * at) for at, value in enumerate(flat)])
    assert not drifts([1.0, 2.0, 3.0])


def test_bad_samples_are_refused() -> None:
    """Catches: a summary of nothing, or of NaN."""
    with pytest.raises(ValueError, match="no samples"):
        spread([])
    with pytest.raises(ValueError, match="finite"):
        spread([1.0, float("nan")])
    with pytest.raises(ValueError, match="even number"):
        pair_ratios([1.0], [1.0])
