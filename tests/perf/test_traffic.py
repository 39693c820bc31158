"""Arrivals, and the figures of answers."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace

import pytest

from rapid_llm.perf.traffic import Answer, Traffic, figures

TRAFFIC = Traffic(rate=2.0, requests=4, prompt_tokens=10, output_tokens=3)


def test_arrivals_are_poisson_and_repeatable() -> None:
    """Catches: even spacing, a rate that is a gap, arrivals that another run does not repeat.

    The gaps of a Poisson process of rate r have mean and deviation 1 / r; over 4000 of them each lies within five of
    its standard errors.
    """
    many = replace(TRAFFIC, rate=5.0, requests=4001)
    found = many.arrivals()
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert found[0] == 0.0
    assert found == many.arrivals() != replace(many, seed=1).arrivals()
    assert abs(statistics.mean(gaps) - 0.2) < 5 * 0.2 / 4000**0.5
    assert abs(statistics.stdev(gaps) - 0.2) < 5 * 0.2 * (2 / 4000) ** 0.5
    assert set(replace(TRAFFIC, rate=math.inf).arrivals()) == {0.0}


def test_prompts_share_nothing() -> None:
    """Catches: prompts that a prefix cache knows, within a run or from the one before."""
    seen = [tuple(replace(TRAFFIC, rate=r).prompt(n)[:3]) for r in (1.0, 2.0) for n in range(-2, 50)]
    assert len(set(seen)) == len(seen)
    assert all(len(TRAFFIC.prompt(n)) == 10 for n in range(3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rate": 0.0}, "--rate 0"),
        ({"rate": math.nan}, "--rate nan"),
        ({"requests": 0}, "--requests 0"),
        ({"prompt_tokens": 0}, "--prompt-tokens 0"),
        ({"output_tokens": -1}, "--output-tokens -1"),
        ({"ttft_slo": 0.0}, "--ttft-slo 0"),
        ({"itl_slo": math.inf}, "--itl-slo inf"),
    ],
)
def test_nonsense_is_refused(change: dict[str, float], says: str) -> None:
    """Catches: a run that never ends, or divides by nothing."""
    with pytest.raises(ValueError, match=says):
        replace(TRAFFIC, **change)


def answers() -> list[Answer]:
    return [
        Answer(0.0, sent=0.0, times=[0.1, 0.2, 0.4], tokens=3),
        Answer(1.0, sent=1.5, times=[2.0, 2.1, 2.2], tokens=3),  # late: its wait counts from 1.0
        Answer(1.0, sent=1.0, error="503: full"),
        Answer(2.0, sent=2.0, times=[2.5], tokens=1),
    ]


def test_waits_count_from_when_a_request_was_due() -> None:
    """Catches: a client that is late flattering the server; percentiles over the wrong samples."""
    found = figures(replace(TRAFFIC, ttft_slo=0.6, itl_slo=0.12), answers(), 0.0)
    assert found["ttft_seconds"]["p50"] == pytest.approx(0.5)
    assert found["ttft_seconds"]["max"] == pytest.approx(1.0)
    assert found["itl_seconds"]["p50"] == pytest.approx(0.1)
    assert found["itl_seconds"]["max"] == pytest.approx(0.2)
    assert found["tpot_seconds"]["max"] == pytest.approx(0.15)
    assert found["seconds"] == pytest.approx(2.5)
    assert found["output_tokens_per_second"] == pytest.approx(7 / 2.5)
    assert found["prompt_tokens_per_second"] == pytest.approx(30 / 2.5)
    assert found["requests_per_second"] == pytest.approx(3 / 2.5)
    assert found["concurrency"] == pytest.approx((0.4 + 1.2 + 0.5) / 2.5)
    assert found["errors"] == {"503: full": 1}
    assert found["completed"] == 3
    assert "late client" in found["flags"]


def test_goodput_counts_answers_that_meet_both_limits() -> None:
    """Catches: failed requests that meet every limit, one limit that replaces the other, a share of those alone that
    completed."""
    shares = {}
    for ttft, itl in ((0.6, 0.12), (0.6, None), (None, 0.12), (None, None), (1.1, 0.16)):
        found = figures(replace(TRAFFIC, ttft_slo=ttft, itl_slo=itl), answers(), 0.0)
        shares[ttft, itl] = found["share_within_slo"]
        assert found["goodput_requests_per_second"] == pytest.approx(4 * found["share_within_slo"] / 2.5)
    assert shares == {(0.6, 0.12): 0.25, (0.6, None): 0.5, (None, 0.12): 0.5, (None, None): 0.75, (1.1, 0.16): 0.75}


def test_events_that_hold_several_tokens_are_told() -> None:
    """Catches: the time between events passed off as the time between tokens."""
    found = figures(TRAFFIC, [Answer(0.0, times=[1.0, 2.0], tokens=5)], 0.0)
    assert found["tpot_seconds"]["p50"] == pytest.approx(0.25)
    assert found["tokens_an_event"] == 2.5
    assert found["flags"] == ["several tokens an event"]


def test_nothing_completed() -> None:
    """Catches: a division by nothing where every request failed."""
    found = figures(TRAFFIC, [Answer(0.0, error="x"), Answer(0.0)], 0.0)
    assert found["errors"] == {"x": 1, "no text came": 1}
    assert (found["ttft_seconds"], found["requests_per_second"]) == (None, 0.0)
