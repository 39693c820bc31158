"""`bench_host` on a fake clock: what it reports is what the function took, no more and no less."""

from __future__ import annotations

import gc

import pytest

from rapid_llm.bench import ResolutionError, bench_host
from tests.bench.fakes import FakeClock


def test_subtracts_a_control_of_the_same_run() -> None:
    """Catches: the loop's cost counted as the function's, or the control left out."""
    clock = FakeClock()
    result = bench_host(clock.work(130), control=clock.work(30), clock=clock, block_seconds=1e-5)
    assert (result.ns, result.control.min, result.net_ns) == (130, 30, 100)


def test_reports_the_best_block_and_keeps_the_worst() -> None:
    """Catches: a mean in place of the best of blocks, and silent trimming of slow ones."""
    clock = FakeClock()
    costs = iter([100] * 1000 + [100, 900, 300, 100] * 100_000)

    def fn() -> None:
        clock.now += next(costs)

    result = bench_host(fn, reset=lambda: None, control=clock.work(10), clock=clock, blocks=1200)
    assert (result.blocks.min, result.blocks.max, result.blocks.count) == (100, 900, 1200)
    assert result.blocks.min <= result.blocks.median <= result.blocks.max


def test_blocks_alternate_with_the_control() -> None:
    """Catches: control and function measured one after the other, so that a drift favours one."""
    clock, seen = FakeClock(), []

    def fn() -> None:
        seen.append("f")
        clock.now += 10

    def control() -> None:
        seen.append("c")
        clock.now += 10

    bench_host(fn, reset=lambda: None, control=control, clock=clock, blocks=4)
    assert "".join(seen) == "f" + "cf" * 4


def test_a_block_lasts_as_long_as_asked() -> None:
    """Catches: an inner loop that is not calibrated, so that the clock's own cost shows."""
    clock = FakeClock()
    result = bench_host(clock.work(50), control=clock.work(5), clock=clock, block_seconds=1e-4, blocks=3)
    assert 1e5 <= result.loops * 50 <= 2e6


def test_reset_runs_before_every_call_and_is_not_timed() -> None:
    """Catches: reset inside the timed window, or once a block while many calls follow."""
    clock, state = FakeClock(), {"fresh": False, "resets": 0}

    def reset() -> None:
        clock.now += 10_000
        state["fresh"], state["resets"] = True, state["resets"] + 1

    def fn() -> None:
        clock.now += 70 if state["fresh"] else 7
        state["fresh"] = False

    result = bench_host(fn, reset, control=clock.work(20), clock=clock, blocks=5)
    assert (result.blocks.min, result.blocks.max, result.loops) == (70, 70, 1)
    assert state["resets"] == 1 + 2 * 5


def test_arguments_reach_function_and_control_alike() -> None:
    """Catches: a control with another call shape, which would subtract another cost."""
    clock, seen = FakeClock(), set()

    def fn(a: int, b: int, *, out: str) -> None:
        seen.add(("fn", a, b, out))
        clock.now += 20

    def control(a: int, b: int, *, out: str) -> None:
        seen.add(("control", a, b, out))
        clock.now += 10

    bench_host(fn, args=(1, 2), kwargs={"out": "x"}, control=control, clock=clock, block_seconds=1e-6)
    assert seen == {("fn", 1, 2, "x"), ("control", 1, 2, "x")}


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_collection_is_off_inside_and_put_back(was_on: bool) -> None:
    """Catches: collector runs inside a block, or a setting that outlives the call, also after an error."""
    seen, before = [], gc.isenabled()
    try:
        gc.enable() if was_on else gc.disable()
        bench_host(lambda: seen.append(gc.isenabled()), reset=lambda: None, blocks=3)
        assert not any(seen)
        assert gc.isenabled() is was_on
        with pytest.raises(ZeroDivisionError):
            bench_host(lambda: 1 / 0)
        assert gc.isenabled() is was_on
    finally:
        gc.enable() if before else gc.disable()


def test_a_clock_that_stands_still_is_refused() -> None:
    """Catches: a division by zero, or a figure of 0 ns that beats everything."""
    with pytest.raises(ResolutionError, match="clock did not move"):
        bench_host(lambda: None, clock=lambda: 0)
    with pytest.raises(ResolutionError, match="took no time"):
        bench_host(lambda: None, reset=lambda: None, clock=lambda: 0)


@pytest.mark.parametrize(("bad", "text"), [({"blocks": 2}, "blocks=2"), ({"block_seconds": 0.0}, "block_seconds=0.0")])
def test_senseless_arguments_are_named(bad: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        bench_host(lambda: None, **bad)


def test_a_real_call_costs_more_than_nothing() -> None:
    """Catches: a loop that never calls the function (on the real clock)."""
    data = list(range(2000))
    result = bench_host(sum, args=(data,), blocks=5, block_seconds=0.001)
    assert result.net_ns > 1000
