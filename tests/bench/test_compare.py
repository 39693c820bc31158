"""Interleaved comparison on a fake clock, with drift and noise that the real one has."""

from __future__ import annotations

import random

import pytest

from rapid_llm.bench import Arm, ResolutionError, compare_arms
from rapid_llm.bench.compare import AGAIN
from tests.bench.fakes import FakeClock


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake clock they change nothing; in a long test session each takes many milliseconds."""
    monkeypatch.setattr("gc.collect", lambda: 0)


def _drifting(clock: FakeClock, ns: float, drift: float, jitter: float, rng: random.Random):
    """An arm's work: `ns`, growing by `drift` over each millisecond of fake time, with a jitter of +-`jitter`."""

    def run() -> None:
        clock.now += int(ns * (1 + drift * clock.now / 1e6) * (1 + rng.uniform(-jitter, jitter)))

    return run


def test_every_round_runs_every_arm_and_directions_alternate() -> None:
    """Catches: arms run one after the other, so that a drift of the machine becomes a difference of arms."""
    clock, seen = FakeClock(), []

    def arm(name: str) -> Arm:
        def run() -> None:
            seen.append(name)
            clock.now += 10

        return Arm(name, run)

    compare_arms([arm("a"), arm("b")], baseline="a", rounds=4, warmup=1, clock=clock)
    assert "".join(seen) == "ab" + "aba" * 4  # the baseline stands at both ends of each round
    assert len(seen) == 2 + 3 * 4


def test_setup_is_untimed_and_its_result_is_used() -> None:
    """Catches: preparation counted as work."""
    clock = FakeClock()

    def setup() -> int:
        clock.now += 10**9
        return 500

    def run(ns: int) -> None:
        clock.now += ns

    arms = [Arm("a", clock.work(1000)), Arm("b", run, setup)]
    result = compare_arms(arms, baseline="a", rounds=3, clock=clock)
    assert result.speedup("b").median == 2.0
    assert result.time("b").max == 500e-9


def test_ratios_are_per_unit_of_work_and_against_the_fastest_rival() -> None:
    """Catches: rates confused with times, and a rival chosen by name where the faster one must be met."""
    clock = FakeClock()
    arms = [
        Arm("slow", clock.work(400), units=4),
        Arm("quick", clock.work(100), units=2),
        Arm("us", clock.work(50), units=2),
    ]
    result = compare_arms(arms, baseline="slow", rounds=3, clock=clock)
    assert result.rate("us").median == pytest.approx(4e7)
    assert result.speedup("us").median == pytest.approx(4.0)
    assert result.speedup("us", over=("slow", "quick")).median == pytest.approx(2.0)
    assert result.speedup("slow").median == 1.0


def test_drift_gives_no_phantom_difference() -> None:
    """Catches B29: with a steady slow-down, equal arms must not be called different, in 200 simulated runs."""
    rng, wrong = random.Random(0), 0
    for _ in range(200):
        clock = FakeClock()
        arms = [Arm(name, _drifting(clock, 10_000, 0.02, 0.03, rng)) for name in "ab"]
        result = compare_arms(arms, baseline="a", rounds=8, clock=clock)
        wrong += result.verdict("b") != "undecided"
    assert wrong <= 2


@pytest.mark.parametrize(("cost", "verdict"), [(5_000, "faster"), (20_000, "slower")])
def test_a_real_difference_is_seen_through_drift_and_noise(cost: int, verdict: str) -> None:
    """Catches: a verdict that is always undecided, or upside down."""
    clock, rng = FakeClock(), random.Random(1)
    arms = [Arm("a", _drifting(clock, 10_000, 0.02, 0.05, rng)), Arm("b", _drifting(clock, cost, 0.02, 0.05, rng))]
    result = compare_arms(arms, baseline="a", rounds=6, clock=clock)
    assert result.verdict("b") == verdict
    assert result.control.min <= 1.15
    assert result.control.max >= 0.87


def test_the_control_shows_the_noise() -> None:
    """Catches: a control that is computed from the same runs, and so always reads 1."""
    clock, rng = FakeClock(), random.Random(2)
    result = compare_arms([Arm("a", _drifting(clock, 10_000, 0.0, 0.2, rng))], baseline="a", rounds=8, clock=clock)
    assert result.seconds["a"] != result.seconds["a" + AGAIN]
    assert result.control.max > 1.02
    assert set(result.json()["arms"]) == {"a", "a" + AGAIN}


def test_bad_requests_are_refused_by_name() -> None:
    clock = FakeClock()
    arm = Arm("a", clock.work(10))
    with pytest.raises(ValueError, match="'x' is not an arm"):
        compare_arms([arm], baseline="x", clock=clock)
    with pytest.raises(ValueError, match="names must differ"):
        compare_arms([arm, arm], baseline="a", clock=clock)
    with pytest.raises(ValueError, match="rounds=2"):
        compare_arms([arm], baseline="a", rounds=2, clock=clock)
    with pytest.raises(ResolutionError, match="'a' took no time"):
        compare_arms([Arm("a", lambda: None)], baseline="a", clock=clock)
