"""Several functions in one comparison, on a scripted device: order, verdicts, refusals and what is printed of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rapid_llm.bench import RowArm, compare
from rapid_llm.bench import errors as e
from rapid_llm.bench.rows import RowComparison
from rapid_llm.bench.work import Work
from tests.bench.cheats import FACTOR, MOVED, SIZE, honest
from tests.bench.fake_device import FLOOR, FakeDevice
from tests.bench.test_refusals import CHECK, numbers

ROWS = {"base": 10e-6, "quick": 8e-6, "slow": 12e-6, "like": 10.05e-6}


def run(device: FakeDevice, rows: dict[str, Callable[..., Any]], **changes: Any) -> RowComparison:
    options = {"work": Work(MOVED, SIZE), "check": CHECK, "out": torch.empty(SIZE), "device": device, **changes}
    return compare(rows, (numbers(),), **options)


def noisy(device: FakeDevice, share: float, drift: float = 0.0) -> FakeDevice:
    rng = random.Random(1)
    device.noise = lambda index: (1 + drift * index) * (1 + rng.gauss(0, share))
    return device


def test_verdicts_through_noise_and_drift() -> None:
    """Catches B29: arms timed one after the other, so that a slowing device decides."""
    device = noisy(FakeDevice(), 0.003, drift=0.0005)
    found = run(device, {name: honest(device, took) for name, took in ROWS.items()})
    words = {name: found.verdict(name) for name in found.results}
    assert words == {"base": "SAME", "quick": "FAST", "slow": "SLOW", "like": "SAME"}
    assert found.ratios["quick"].median == pytest.approx(0.8, rel=0.01)
    assert found.control.count == found.ratios["quick"].count >= 7
    assert set(found.results) == set(ROWS)


def test_rounds_alternate_and_end_with_the_control() -> None:
    """Catches: an order that is always the same; a control that is the baseline's own samples."""
    device, seen = FakeDevice(), []

    def arm(name: str) -> Callable[..., Any]:
        def fn(x: torch.Tensor, out: torch.Tensor) -> None:
            device.launch(10e-6, lambda: (seen.append(name), torch.mul(x, FACTOR, out=out)))

        return fn

    found = run(device, {"a": arm("a"), "b": arm("b")}, rounds=14)
    calls = len(found.results["a"].plan.order)
    blocks = seen[::calls]
    text = "".join(blocks)
    assert "ab" + "aa" + "ba" in text  # a b a', a' b a


def test_near_ties_keep_the_present_choice() -> None:
    """Catches: a choice that flips by noise, and one that is kept although another is faster."""
    device = FakeDevice()
    tie = run(device, {name: honest(device, ROWS[name]) for name in ("base", "like", "slow")})
    assert tie.choose("base") == "base"
    found = run(device, {name: honest(device, took) for name, took in ROWS.items()})
    assert found.choose("base") == "quick"
    with pytest.raises(ValueError, match="compare again"):
        found.choose("slow")


def test_floor_limited_arms_rank_nothing() -> None:
    """Catches B18: the floor of the timer compared with itself and called FAST."""
    device = FakeDevice()
    rows = {"a": honest(device, 2.5 * FLOOR), "b": honest(device, 1.5 * FLOOR), "c": honest(device, 9 * FLOOR)}
    found = run(device, rows)
    assert found.results["b"].floor_limited
    assert found.verdict("b") == "UNDECIDED"
    assert found.verdict("c") == "SLOW"
    assert not found.results["c"].floor_limited


def test_a_refused_arm_leaves_the_others_their_figures() -> None:
    """Catches: one cheat that ends a sweep, or that stands in the table with a number."""
    device = FakeDevice()

    def lazy(x: torch.Tensor, out: torch.Tensor) -> None:
        device.launch(1e-6)

    found = run(device, {"base": honest(device), "lazy": lazy, "early": honest(device, 1e-12)})
    assert set(found.results) == {"base"}
    assert {name: error.code for name, error in found.refused.items()} == {"lazy": "unwritten", "early": "too_fast"}
    with pytest.raises(e.UnwrittenError):
        run(device, {"base": lazy, "other": honest(device)})


def test_pairs_with_a_disturbed_round_are_dropped_for_all() -> None:
    """Catches: ratios of rounds that did not run side by side, because one arm lost a sample."""
    device = FakeDevice()
    from rapid_llm.bench.device import Clocks

    hot, cool, turns = Clocks(1000, 2600, 0x8), Clocks(1980, 2600, 0), iter(range(10**6))
    device.states = (hot if next(turns) in (9, 36) else cool for _ in iter(int, 1))
    found = run(device, {"a": honest(device), "b": honest(device, 7e-6)}, rounds=20)
    counts = {len(result.samples) for result in found.results.values()}
    assert counts == {16}
    assert found.ratios["b"].count == 8
    assert found.dropped == found.json()["dropped_pairs"] == 2


def test_time_is_capped_but_enough_pairs_are_taken() -> None:
    """Catches B22, B37: a suite of hours under noise; three samples after a slow warm-up."""
    now = iter(range(0, 10**15, 10**12))
    device = noisy(FakeDevice(), 0.3)
    found = run(device, {"a": honest(device), "b": honest(device)}, max_seconds=0.001, clock=lambda: next(now))
    assert found.ratios["b"].count == 7
    assert "noisy" in found.results["b"].flags


def test_arms_of_another_form_are_compared_too() -> None:
    """Catches: a packed weight that is judged by its packed form, or rotated in the plain one."""
    device, weight = FakeDevice(), torch.randn(SIZE)

    def packed(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        device.launch(5e-6, lambda: torch.mul(x, w.flip(0), out=out))

    def plain(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        device.launch(9e-6, lambda: torch.mul(x, w, out=out))

    out = torch.empty(SIZE)
    arms = [
        RowArm("plain", plain, out),
        RowArm("packed", packed, out, adapt=lambda values: {**values, 1: values[1].flip(0)}),
    ]
    from rapid_llm.bench import against

    check = against(torch.mul, relative=1e-6, absolute=0)
    found = compare(arms, (numbers(), weight), work=Work(MOVED), check=check, device=device)
    assert found.verdict("packed") == "FAST"


def test_overlap_of_calls_is_flagged() -> None:
    """Catches B27: calls that run into each other in a batch, and a batch sold as the time of one."""
    device = FakeDevice()

    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        alone = device.capture is not None and len(device.capture) == 0
        device.launch(40e-6 if alone else 5e-6, lambda: torch.mul(x, FACTOR, out=out))

    assert "overlaps" in run(device, {"a": fn}).results["a"].flags
    assert "overlaps" not in run(device, {"a": honest(device)}).results["a"].flags


def test_the_record_holds_raw_samples_and_reads_back() -> None:
    """Catches: a result file without its samples, its labels or its refusals, or with NaN in it."""
    device = FakeDevice()
    found = run(device, {"a": honest(device), "b": lambda x, out: None})
    record = json.loads(json.dumps(found.json(), allow_nan=False))
    assert len(record["arms"]["a"]["samples"]) == 40
    assert record["arms"]["a"]["label"] == "cold"
    assert record["arms"]["a"]["plan"]["reuse_bytes"] >= 5 * device.cache_bytes
    assert record["refused"]["b"]["code"] == "unwritten"


def test_bad_requests_are_named() -> None:
    """Catches: a wrong baseline that silently becomes the first arm."""
    device = FakeDevice()
    with pytest.raises(ValueError, match="baseline='x'"):
        run(device, {"a": honest(device)}, baseline="x")
    with pytest.raises(ValueError, match="names must differ"):
        compare([RowArm("a", honest(device))] * 2, (numbers(),), work=Work(MOVED), check=CHECK, device=device)
