"""The comparison itself: what it must never let pass."""

from __future__ import annotations

import math

import pytest
import torch

from rapid_llm.verify.compare import compare, compare_ids
from rapid_llm.verify.selection import AcceptableIds

EXPECTED = torch.tensor([1.0, -2.0, 0.0, 3.0], dtype=torch.float64)
BOUND = torch.full((4,), 1e-6, dtype=torch.float64)


def problem(got: list[float], expected: torch.Tensor = EXPECTED, bound: torch.Tensor = BOUND) -> str | None:
    return compare(torch.tensor(got), expected, bound).problem


def test_right_values_pass() -> None:
    assert problem([1.0, -2.0, 0.0, 3.0]) is None


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 7.0])
def test_one_wrong_element_fails(index: int, wrong: float) -> None:
    """B45: a single NaN, infinity or wrong number among right ones."""
    got = EXPECTED.tolist()
    got[index] = wrong
    text = problem(got)
    assert text is not None
    assert f"[{index}]" in text


def test_nan_is_no_wildcard() -> None:
    """B37: where the oracle says NaN, a number is wrong, and the other way round."""
    expected = torch.tensor([math.nan, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert problem([math.nan, 1.0, 1.0, 1.0], expected) is None
    assert problem([1.0, 1.0, 1.0, 1.0], expected) is not None
    assert problem([math.nan, math.nan, 1.0, 1.0], expected) is not None


def test_infinities_are_exact() -> None:
    expected = torch.tensor([math.inf, -math.inf], dtype=torch.float64)
    bound = torch.zeros(2, dtype=torch.float64)
    assert problem([math.inf, -math.inf], expected, bound) is None
    assert problem([math.inf, math.inf], expected, bound) is not None
    assert problem([3e38, -math.inf], expected, bound) is not None


def test_overflow_may_round_to_infinity_only_where_the_format_ends() -> None:
    """Would go red if infinity were accepted for a large number, or refused for one that must overflow."""
    top = torch.finfo(torch.float16).max  # 65504; 65520 is the tie that rounds to infinity
    half = torch.full((1,), 16.0, dtype=torch.float64)
    for value, allowed in ((65520.0, True), (65519.0, False), (top, False), (70000.0, True)):
        outcome = compare(torch.tensor([math.inf]).half(), torch.tensor([value], dtype=torch.float64), half)
        assert (outcome.problem is None) == allowed, value
    beyond = torch.tensor([70000.0], dtype=torch.float64)
    assert compare(torch.tensor([top]).half(), beyond, half).problem is not None


def test_zero_bound_means_equal() -> None:
    """B46: tightening to 0 must fail a one-ulp error."""
    bound = torch.zeros(1, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    assert compare(torch.ones(1), one, bound).problem is None
    assert compare(torch.nextafter(torch.ones(1), torch.tensor(2.0)), one, bound).problem is not None


def test_a_share_of_the_answer_fails() -> None:
    """B47: 0.3 of the output, or 5 % of zero rows, must fail."""
    expected = torch.randn(100, 8, dtype=torch.float64)
    bound = expected.abs() * 1e-3
    assert compare((expected * 0.3).float(), expected, bound).problem is not None
    got = expected.float()
    got[::20] = 0
    text = compare(got, expected, bound).problem
    assert text is not None
    assert text.startswith("40 of 800")


def test_wrong_shape_and_nothing_at_all() -> None:
    """Would go red if broadcasting or an empty result counted as compared elements."""
    assert problem([1.0]) is not None
    empty = torch.empty(0, dtype=torch.float64)
    outcome = compare(torch.empty(0), empty, empty)
    assert outcome.elements == 0


def test_bad_bounds_are_refused() -> None:
    for bad in (math.nan, -1.0):
        with pytest.raises(ValueError, match="bound"):
            compare(torch.ones(1), torch.ones(1, dtype=torch.float64), torch.tensor([bad], dtype=torch.float64))


def test_ids() -> None:
    """Ids outside of the vocabulary, ids not allowed, and -1 in the wrong place are all wrong."""
    allowed = torch.tensor([[True, False], [False, True], [False, False]])
    expected = AcceptableIds(allowed, torch.tensor([False, False, True]))
    assert compare_ids(torch.tensor([0, 1, -1]), expected).problem is None
    for wrong in ([1, 1, -1], [0, 2, -1], [0, -1, -1], [0, 1, 0], [-2, 1, -1]):
        assert compare_ids(torch.tensor(wrong), expected).problem is not None, wrong
    assert compare_ids(torch.tensor([0, 1]), expected).problem is not None
