"""The search for the smallest set: right, and within its number of model runs."""

from __future__ import annotations

import math

import pytest

from rapid_llm.locate.search import smallest


def asked(count: int, guilty: set[int], suspected: int = 0) -> tuple[set[int], int]:
    """What is found among `count` candidates, and in how many calls."""
    calls = []

    def explains(chosen: tuple[int, ...]) -> bool:
        calls.append(chosen)
        return guilty <= set(chosen)

    return set(smallest(range(count), suspected, explains)), len(calls)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 64, 100])
def test_one_guilty_is_found_in_few_calls(count: int) -> None:
    """Catches: an off-by-one at either end, and a search that is linear in the number of rows."""
    for guilty in range(count):
        found, calls = asked(count, {guilty})
        assert found == {guilty}
        assert calls <= math.ceil(math.log2(count)) + 1


def test_a_suspect_is_asked_first() -> None:
    """Catches: a bisection where the bound has named the row already."""
    assert asked(100, {0}, suspected=1) == ({0}, 1)


def test_a_wrong_suspicion_costs_one_call() -> None:
    """Catches: a search that never leaves the suspected."""
    found, calls = asked(64, {50}, suspected=2)
    assert found == {50}
    assert calls <= 6 + 2


@pytest.mark.parametrize("guilty", [{0, 1}, {3, 40}, {5, 6, 62}])
def test_several_that_only_together_explain(guilty: set[int]) -> None:
    """Catches: a search that stops at the first."""
    assert asked(64, guilty)[0] == guilty
