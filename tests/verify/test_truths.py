"""Truths that runs share are those that each would have found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rapid_llm.kernels.ops  # noqa: F401  (registers the ops)
from rapid_llm.kernels import registry
from rapid_llm.verify import truths
from rapid_llm.verify.conformance import check_callable
from rapid_llm.verify.faulty import plain_row
from rapid_llm.verify.truth import truth_of
from rapid_llm.verify.truths import Truths

SCALE, NORM = registry.get_op("scale"), registry.get_op("rmsnorm")


def values(number: float = 1.0, factor: float = 0.5) -> dict[str, Any]:
    return {"input": torch.tensor([[number, 2.0]]), "factor": factor}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The calls whose truth was found anew."""
    calls: list[object] = []

    def find(*args: Any) -> Any:
        calls.append(args)
        return truth_of(*args)

    monkeypatch.setattr(truths, "truth_of", find)
    return calls


def test_a_call_of_other_numbers_has_a_truth_of_its_own(asked: list[object]) -> None:
    """Catches: an answer taken for that of another element, shape, dtype, sign of zero, argument or rounding."""
    kept = Truths()
    calls = [values(), values(1.5), values(0.0), values(-0.0), values(factor=0.25)]
    calls += [{**values(), "input": values()["input"].to(t)} for t in (torch.bfloat16, torch.float16)]
    calls += [{**values(), "input": values()["input"].view(2, 1)}]
    for _ in range(2):
        for call in calls:
            found, wanted = kept.of(SCALE, call, ()), truth_of(SCALE, call, ())
            assert found.values is call
            assert torch.equal(found.expected, wanted.expected)
            assert torch.equal(found.bounds[0], wanted.bounds[0])
    assert len(asked) == len(calls)
    kept.of(SCALE, values(), ("input:bf16",))
    assert len(asked) == len(calls) + 1


def test_views_of_equal_numbers_share_one(asked: list[object]) -> None:
    """Catches: a truth found again for every layout, and strides read as numbers."""
    kept, base = Truths(), torch.arange(12.0).view(3, 4)
    for view in (base, base.t().contiguous().t(), torch.cat([base, base], 1)[:, :4]):
        assert torch.equal(kept.of(SCALE, {"input": view, "factor": 2.0}, ()).expected, base.double() * 2)
    assert len(asked) == 1
    kept.of(SCALE, {"input": base.view(12)[::2][:1], "factor": 2.0}, ())  # contiguous by name, with a stride of 2


def test_what_is_kept_is_bounded(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a run that ends for want of memory; large arguments read again and again."""
    kept = Truths(limit=100)
    for number in range(50):
        kept.of(SCALE, values(float(number)), ())
        assert kept.held <= 100
    assert kept.held > 0
    kept.of(SCALE, values(49.0), ())
    assert len(asked) == 50
    kept.of(SCALE, values(0.0), ())
    assert len(asked) == 51
    monkeypatch.setattr(truths, "_MOST", 4)
    for _ in range(2):
        kept.of(SCALE, values(49.0), ())
    assert len(asked) == 53


def test_a_row_cannot_reach_what_is_kept() -> None:
    """Catches: a row that writes into its arguments and thereby moves the truth for the rows after it."""
    kept, right = Truths(), plain_row("rmsnorm")

    def scribbles(input: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
        result: Tensor = right(input, weight, eps, out=out)
        input.mul_(3.0)
        weight.zero_()
        return result

    def check(fn: Any, **options: Any) -> Any:
        return check_callable(NORM, fn, dtype="fp32", budget="interpret", **options)

    assert not check(scribbles, truths=kept).ok
    alone, after = check(right), check(right, truths=kept)
    assert after.ok
    assert (after.worst_ratio, after.elements, after.calls) == (alone.worst_ratio, alone.elements, alone.calls)
