"""Rounds of arms and what is made of them, with scripted times."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapid_llm.bench.device import Clocks
from rapid_llm.perf.arms import OURS
from rapid_llm.perf.cases import Case
from rapid_llm.perf.needs import Needs
from rapid_llm.perf.offline import CaseResult, difference, measure, prompts_of
from tests.bench.fake_device import FakeDevice
from tests.bench.fakes import FakeClock

from .support import LIMITS, ScriptedArm

CASE = Case("decode", 4, 100, 10)
NEEDS = Needs(bytes=4e12, flops=7e13)  # a second of memory, a tenth of products


def run(*arms: ScriptedArm, **changes: Any) -> CaseResult:
    device: Any = changes.pop("device", FakeDevice())
    options = {"rounds": 4, "max_seconds": 1e9, "clock": FakeClock(), "prompts": lambda number: [[1]], **changes}
    return measure(CASE, NEEDS, arms, LIMITS, device, **options)


def test_figures_of_a_case() -> None:
    """Catches: a rate by the mean, percentiles of a rate at the wrong end, a share of the wrong side or unit."""
    result = run(ScriptedArm([2.0, 4.0, 2.0, 2.0]))
    found = result.json(LIMITS)
    arm = found["arms"][OURS]
    assert arm["tokens_per_second"]["median"] == 20.0
    assert arm["tokens_per_second"]["p10"] == pytest.approx(40 / 3.4)
    assert arm["tokens_per_second"]["p90"] == 20.0
    assert arm["seconds_a_step"]["median"] == 0.2
    assert arm["share_of_bandwidth"] == arm["share_of_roofline"] == 0.5
    assert arm["share_of_nominal_bandwidth"] == pytest.approx(4e12 / 2 / 4.8e12)
    assert arm["share_of_products"] == pytest.approx(0.05)
    assert found["limit"] == {"seconds": 1.0, "tokens_per_second": 40.0, "bound": "memory"}
    assert arm["flags"] == ["noisy"]
    assert arm["samples"] == [2.0, 4.0, 2.0, 2.0]


def test_arms_take_turns_and_ratios_are_of_one_round() -> None:
    """Catches: all rounds of one arm before the other's, ratios of medians that a drift would shift."""
    log: list[str] = []
    ours, peer = ScriptedArm([2.0, 4.0, 8.0], log=log), ScriptedArm([6.0, 12.0, 24.0], "transformers", log=log)
    result = run(ours, peer, rounds=3)
    pairs = [["rapid-llm", "transformers"], ["transformers", "rapid-llm"], ["rapid-llm", "transformers"]]
    assert log[:6] == [f"{name} {n}" for n, names in enumerate(pairs) for name in names]
    assert log[6:] == ["rapid-llm ends", "transformers ends"]
    ratio = result.ratios()["transformers"]
    assert (ratio.min, ratio.median, ratio.max) == (3.0, 3.0, 3.0)


def test_a_peer_that_fails_is_missing_and_ours_goes_on() -> None:
    """Catches: a peer's failure that takes our figures with it, or is not said."""
    result = run(ScriptedArm([2.0]), ScriptedArm([1.0], "transformers", fails=ValueError("no such layer\nmore")))
    assert list(result.arms) == [OURS]
    assert result.missing == {"transformers": "ValueError: no such layer"}


def test_refusals_become_the_case_s_reason_and_faults_are_raised() -> None:
    """Catches: one case without memory that ends the whole run; a fault of ours reported as a measurement's."""
    ours = ScriptedArm([2.0, torch.OutOfMemoryError("CUDA out of memory.\nTried")])
    result = run(ours)
    assert (result.code, result.failure, result.arms) == ("out_of_memory", "CUDA out of memory.", {})
    assert ours.log[-1] == "rapid-llm ends"
    with pytest.raises(ZeroDivisionError):
        run(ScriptedArm([ZeroDivisionError()]))
    too_fast = run(ScriptedArm([0.5]))
    assert too_fast.code == "too_fast"
    assert "failure" in too_fast.json(LIMITS)


def test_rounds_end_with_the_time_but_three_are_run() -> None:
    """Catches: a slow case that takes for ever, or is quoted from one round."""
    clock = FakeClock()
    arm = ScriptedArm([2.0])
    inner = arm.run

    def slow(*args: Any) -> float:
        clock.now += 40_000_000_000
        return inner(*args)

    arm.run = slow  # type: ignore[method-assign]
    assert len(run(arm, rounds=9, max_seconds=60, clock=clock).arms[OURS].samples) == 3


def test_rounds_of_a_slowed_device_are_dropped() -> None:
    """Catches: a figure of a GPU that throttled; a run in which most rounds did."""
    calm, hot = Clocks(1, 1, 0), Clocks(1, 1, 0x40)
    states = [calm] * 3 + [hot] + [calm] * 4
    result = run(ScriptedArm([1.0, 9.0, 1.0, 1.0]), device=FakeDevice(states=iter(states)))
    assert result.arms[OURS].samples == (1.0, 1.0, 1.0)
    assert result.arms[OURS].dropped == 1
    assert run(ScriptedArm([1.0]), device=FakeDevice(states=iter([hot] * 20))).code == "throttled"


def test_steps_by_graph_are_those_of_the_timed_rounds() -> None:
    """Catches: counts since the engine began, eager steps of warming up blamed on the rounds."""
    counts = iter(
        [
            {"graph_steps": 5, "eager_steps": {"prompt": 3}, "refused": {}},
            {"graph_steps": 45, "eager_steps": {"prompt": 3, "timed": 2}, "refused": {"4": "why"}},
        ]
    )
    result = run(ScriptedArm([2.0]), graphs=lambda: next(counts))
    assert result.graphs == {"graph_steps": 40, "eager_steps": {"timed": 2}, "refused": {"4": "why"}}
    assert difference(None, None) is None


def test_prompts() -> None:
    """Catches: a prefill that finds its prompt in the cache, decode prompts that change between rounds, equal
    prompts in a batch, which would share their pages."""
    prefill = Case("prefill", 1, 20)
    assert prompts_of(prefill, 1000, 0, 1) != prompts_of(prefill, 1000, 0, 2)
    assert prompts_of(CASE, 1000, 0, 1) == prompts_of(CASE, 1000, 0, 2)
    assert prompts_of(CASE, 1000, 0, 1) != prompts_of(CASE, 1000, 1, 1)
    batch = prompts_of(CASE, 1000, 0, 1)
    assert [len(ids) for ids in batch] == [100] * 4
    assert len({tuple(ids) for ids in batch}) == 4
    assert all(0 <= token < 1000 for ids in batch for token in ids)
