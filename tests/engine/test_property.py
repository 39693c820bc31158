"""The best single test of the engine: whatever happens around a request, it gets what it would get alone, slowly."""

from __future__ import annotations

from collections import Counter

from .scenarios import MUST_HAPPEN, Events, run_scenario

SCENARIOS = range(30, 60)
"""Few enough for every run of the suite, and in which all that is rare happens; `make soak` lives through others."""


def test_every_request_gets_what_it_gets_alone() -> None:
    """Catches any fault of paging, prefixes, guesses, chunking, preemption, abort, batching, seeding, stopping, scoring
    or streaming that shows."""
    events: Events = Counter()
    requests = sum(run_scenario(number, events) for number in SCENARIOS)
    assert requests > 200
    assert events["at_the_edge"] <= 1
    for event in MUST_HAPPEN:
        assert events[event] > 0, event
