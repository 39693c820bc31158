"""Real activations: which calls are kept, and that every row of the op makes them again."""

from __future__ import annotations

import torch

import rapid_llm.kernels.ops  # noqa: F401  (registers the ops)
from rapid_llm.kernels import dispatch
from rapid_llm.kernels.registry import trace
from rapid_llm.verify.recorder import EACH, by_every_row, recording


def test_calls_are_kept_as_they_were() -> None:
    """Catches: arguments kept by reference, which the engine then overwrites; a recorder that stays on."""
    plain = trace.counted
    x = torch.arange(8.0)
    with recording() as kept:
        scale = dispatch("scale", x, 2.0, backend="native")
        for _ in range(EACH + 3):
            scale(x, 2.0)
            x += 1.0
    assert trace.counted is plain
    assert [float(c.args["input"][0]) for c in kept.calls] == [0.0, 1.0, 2.0, 3.0]
    reports = list(by_every_row(kept.calls))
    assert {r.row for r in reports} == {"native/scale"}
    assert all(r.ok for r in reports)


def test_a_call_with_a_packed_weight_is_left_out() -> None:
    """Catches: a weight in a row's own form that is given to the oracle."""
    weight = torch.randn(16, 32)
    with recording() as kept:
        handle = dispatch("linear", torch.ones(1, 32), weight, prepack=True)
        handle(torch.ones(1, 32), handle.prepack(weight))
    assert len(kept.calls) == (handle.spec.prepack is None)
