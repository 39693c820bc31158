"""From a comparison to a record to a choice, by a scripted harness: what is written, what dispatch makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import rapid_llm.kernels  # noqa: F401 - declares the ops
from rapid_llm.bench import KernelResult, RowArm, RowComparison
from rapid_llm.bench.errors import BenchError, WrongResultError
from rapid_llm.bench.stats import spread
from rapid_llm.kernels.registry import dispatch, dispatcher, evidence, records, timing_records
from rapid_llm.kernels.registry.records import SHIPPED, USER
from rapid_llm.tuning import measure, session, watch
from rapid_llm.tuning.calls import Call
from rapid_llm.tuning.measure import Result

CALL = Call("rmsnorm", "fp32", None, {"tokens": 64, "hidden": 48})
FAST, FLOOR = "cpp/rmsnorm", "native/rmsnorm"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Records in a folder of the test's own, and a CPU row that is proven and ready."""
    monkeypatch.setattr(records, "folder", lambda layer: tmp_path / layer)
    monkeypatch.setattr(timing_records, "device_class", lambda device, index=None: f"{device} test")
    monkeypatch.setattr(dispatcher, "make_ready", lambda row, found, unready: True)
    evidence.record(FAST, "cpu", "fp32", cases=1, worst_ulp=0.0, worst_ratio=0.0)
    timing_records.forget()
    dispatcher.forget(None)
    yield
    evidence.forget(FAST)
    timing_records.forget()
    dispatcher.forget(None)


class Harness:
    """Stands for `compare`: answers what was scripted, and remembers what it was asked."""

    def __init__(self, seconds: Mapping[str, float], *, flags: Sequence[str] = (), reach: float = 0.0) -> None:
        self.seconds, self.flags, self.reach = dict(seconds), tuple(flags), reach
        self.asked: list[str] = []

    def __call__(self, arms: Sequence[RowArm], args: Any, kwargs: Any, *, baseline: str, **options: Any) -> Any:
        self.asked = [arm.name for arm in arms]
        base = self.seconds[baseline]
        return RowComparison(
            baseline,
            {name: self.result(name) for name in self.asked if name in self.seconds},
            {name: spread([self.seconds[name] / base] * 7) for name in self.asked if name in self.seconds},
            spread([1.0] * 3 + [1.0 + self.reach] * 4) if self.reach else spread([1.0] * 7),
            {name: WrongResultError("off by one") for name in self.asked if name not in self.seconds},
        )

    def result(self, name: str) -> KernelResult:
        fields: dict[str, Any] = dict.fromkeys(KernelResult.__dataclass_fields__)
        figures = spread([self.seconds[name]] * 7)
        return KernelResult(**{**fields, "name": name, "seconds": figures, "cold": True, "flags": self.flags})


def measured(harness: Harness, call: Call = CALL, **options: Any) -> Result:
    return measure.measure(call, "cpu", run=harness, on=object(), **options)  # type: ignore[arg-type]


def chosen(tokens: int = 64) -> str:
    return dispatch("rmsnorm", device="cpu", dtype="fp32", dims={"tokens": tokens, "hidden": 48}).spec.name


def test_a_measurement_becomes_a_choice() -> None:
    """Catches: a chain with a broken link, from the harness to the record to dispatch."""
    assert chosen() == FAST
    result = measured(Harness({FAST: 2e-5, FLOOR: 1e-5}))
    assert (result.before, result.failure) == (FAST, "")
    assert chosen() == FAST, "nothing was written yet"
    (told,) = measure.record([result], "cpu", timing_records.path_of(USER, "cpu test"))
    assert (told.before, told.after, told.regret) == (FAST, FLOOR, 0.0)
    assert chosen() == FLOOR
    assert chosen(65) == FAST
    point = timing_records.table(USER, "cpu test").points[0]
    assert point.rows[FLOOR].us == 10.0
    assert (point.rows[FLOOR].ratio, point.rows[FAST].ratio) == (0.5, 1.0)
    assert dict(point.dims) == dict(CALL.dims)


def test_the_noise_of_a_run_goes_with_its_ratios() -> None:
    """Catches: a row that wins by less than the baseline differed from itself."""
    result = measured(Harness({FAST: 2e-5, FLOOR: 1.8e-5}, reach=0.2))
    (told,) = measure.record([result], "cpu", timing_records.path_of(USER, "cpu test"))
    assert told.after == FAST
    assert told.regret == pytest.approx(1 / 0.9 - 1)


def test_limits_of_the_floor_rank_nothing() -> None:
    """Catches: rows ordered by what a launch costs."""
    result = measured(Harness({FAST: 2e-5, FLOOR: 1e-5}, flags=["floor-limited"]))
    (told,) = measure.record([result], "cpu", timing_records.path_of(USER, "cpu test"))
    assert told.point is not None
    assert told.point.order == ()
    assert chosen() == FAST


def test_only_proven_rows_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a wrong row that becomes the fastest one."""
    proven = evidence.of

    def of(spec: Any, facts: Any) -> Any:
        found = proven(spec, facts)
        return replace(found, state="unverified") if spec.name == FAST else found

    monkeypatch.setattr(evidence, "of", of)
    harness = Harness({FAST: 1e-6, FLOOR: 1e-5})
    result = measured(harness)
    assert harness.asked == [FLOOR]
    assert "kernels verify cpp/rmsnorm" in result.missing[FAST]


def test_a_named_row_is_timed_before_it_is_proven_and_not_recorded() -> None:
    """Catches: an author's loop in which each edit, which makes the evidence stale, ends the timing; and a record of a
    row that nobody proved."""
    evidence.quarantine(FAST, "cpu", "it was wrong here")
    dispatcher.forget(None)
    harness = Harness({FAST: 1e-6, FLOOR: 1e-5})
    result = measured(harness, rows=[FAST], unproven=True)
    assert sorted(harness.asked) == [FAST, FLOOR]
    assert result.before == FLOOR
    assert result.comparison is not None
    assert FAST in result.comparison.results
    assert result.point is not None
    assert list(result.point.rows) == [FLOOR]
    assert "quarantined" in result.missing[FAST]
    measured(harness, rows=[FAST])
    assert harness.asked == [FLOOR]


def test_a_refused_row_has_no_time_and_a_reason() -> None:
    """Catches: a row whose figure cannot be trusted that is ranked all the same, or vanishes without a word."""
    result = measured(Harness({FAST: 2e-5}))
    assert result.point is not None
    assert list(result.point.rows) == [FAST]
    assert result.missing[FLOOR] == "refused (wrong_result): off by one"


def test_one_row_is_measured_against_the_chosen_one() -> None:
    """Catches: a row named and others measured with it, or without the one to beat."""
    harness = Harness({FAST: 2e-5, FLOOR: 1e-5})
    measured(harness, rows=[FLOOR])
    assert sorted(harness.asked) == [FAST, FLOOR]
    measured(harness, rows=[FAST])
    assert harness.asked == [FAST]


def test_what_fails_is_told_and_the_run_goes_on() -> None:
    """Catches: one call that ends a run of an hour."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise BenchError("too hot")

    assert measure.measure(CALL, "cpu", run=broken, on=object()).failure == "BenchError: too hot"  # type: ignore[arg-type]
    assert "no example arguments" in measure.measure(Call("scratch", "fp32"), "cpu").failure


def test_a_run_goes_op_by_op_and_ends_in_time() -> None:
    """Catches: records written only at the end of a run that is ended before; calls begun after the time is over."""
    ticks = count(0, 10_000_000_000)
    calls = [replace(CALL, dims={"tokens": 64, "hidden": n}) for n in (8, 16, 32, 48)]
    seen: list[str] = []
    results = list(
        session.run(
            calls,
            "cpu",
            path=timing_records.path_of(USER, "cpu test"),
            measured=lambda call, device: measured(Harness({FAST: 2e-5, FLOOR: 1e-5}), call),
            seconds=25,
            clock=lambda: next(ticks),
            told=lambda result: seen.append(result.failure),
        )
    )
    assert [bool(r.point) for r in results] == [True, True, False, False]
    assert "the time given for the run was over" in seen[2]
    totals = session.summary(results)
    assert (totals["calls"], totals["measured"], totals["changed"], totals["worst_regret"]) == (4, 2, 2, 0.0)
    assert len(timing_records.table(USER, "cpu test").points) == 2


def test_names_mean_ops_and_rows() -> None:
    """Catches: a row's name that measures all of its op's rows, an op's that measures one."""
    assert session.select(["rmsnorm"]) == session.Selection(("rmsnorm",), ())
    assert session.select([FAST]) == session.Selection(("rmsnorm",), (FAST,))
    assert session.select(["rmsnorm", FAST]).rows == ()
    assert "linear" in session.select([]).ops
    with pytest.raises(Exception, match="unknown row 'nothing'"):
        session.select(["nothing"])


def test_where_records_go(tmp_path: Path) -> None:
    """Catches: shipped records overwritten by a run that was told `user`."""
    assert session.target(None, "cpu") is None
    assert session.target("user", "cpu") == tmp_path / USER / "timings" / "cpu-test.json"
    assert session.target("shipped", "cpu") == tmp_path / SHIPPED / "timings" / "cpu-test.json"
    assert session.target(str(tmp_path / "x"), "cpu") == tmp_path / "x" / "cpu-test.json"
    elsewhere = measure.record([measured(Harness({FAST: 2e-5, FLOOR: 1e-5}))], "cpu", tmp_path / "x" / "cpu-test.json")
    assert elsewhere[0].after == FLOOR
    assert chosen() == FAST


def test_a_watch_sees_each_change_once() -> None:
    """Catches: a row timed without end, not at all, or while its file cannot be parsed."""
    digests = iter(["a", "a", None, "b", "b", "a"])
    pauses: list[int] = []
    found = watch.changes("x/y", look=lambda row: next(digests), pause=lambda: pauses.append(1))
    assert [next(found) for _ in range(3)] == ["a", "b", "a"]
    assert len(pauses) == 5
    assert watch.source_digest(FAST) is not None


@pytest.mark.gpu
def test_rows_on_a_gpu() -> None:
    """Catches: arguments, captures or checks of a real device that the scripted harness does not have."""
    heads = {"query_heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 16}
    for call in (
        Call("rmsnorm", "bf16", None, {"tokens": 512, "hidden": 4096}),
        Call("attention.decode", "bf16", None, {"sequences": 4, **heads}),
    ):
        result = measure.measure(call, "cuda", rounds=14, max_seconds=0.5)
        assert not result.failure
        (told,) = measure.record([result], "cuda", timing_records.path_of(USER, "cuda test"))
        assert told.point is not None
        assert told.point.rows
        assert told.regret <= 0.02 + told.point.reach
