"""Measured times and the rank of rows: what they decide, what they must not, and where they end."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rapid_llm.kernels.registry import Dim, Shape, codegen, dispatch, dispatcher, explain, get_row, records, registry
from rapid_llm.kernels.registry import timing_records as store
from rapid_llm.kernels.registry.records import SHIPPED, USER, Source
from rapid_llm.kernels.registry.timings import Point, Timing, merged, order
from rapid_llm.platform import DeviceInfo
from tests import scratch

CPU = "cpu test"
NAMES = ("alpha/scratch", "beta/scratch", "gamma/scratch")
DIMS = {"tokens": 4, "hidden": 64}
FACTS = {"device": "cpu", "dtype": "fp32", "dims": DIMS}


@pytest.fixture
def rows(op: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Three proven rows of priorities 30, 20 and 10, on a machine of class `cpu test`."""
    monkeypatch.setattr(store, "device_class", lambda device, index=None: CPU if device == "cpu" else "cuda test")
    monkeypatch.setattr(codegen, "_by_shape", set())
    store.forget()
    for name, priority in zip(NAMES, (30, 20, 10), strict=True):
        registry.register(scratch.row(name, f"{op}:fast", priority=priority))
        scratch.prove(name)
    yield op
    store.forget()


def timing(ratio: float, noise: float = 0.005, *flags: str) -> Timing:
    return Timing(100 * ratio, 98 * ratio, 103 * ratio, ratio, ratio * (1 - noise), ratio * (1 + noise), flags)


def point(times: Mapping[str, float | Timing], dims: Mapping[str, int] = DIMS, **changes: object) -> Point:
    found = {name: t if isinstance(t, Timing) else timing(t) for name, t in times.items()}
    return Point("scratch", "fp32", None, dict(dims), found, **changes)  # type: ignore[arg-type]


def save(*points: Point, layer: str = USER, kind: str = CPU, **changes: str) -> tuple[Point, ...]:
    """Write points as a run would, whose order was that of priority; `changes` are of the rows' sources."""
    sources = {}
    for name in {name for p in points for name in p.rows}:
        source = store.source_of(get_row(name))
        assert source is not None
        sources[name] = replace(source, **changes)
    prior = (*NAMES, "native/scratch")
    asked = [replace(p, order=p.order or tuple(n for n in prior if n in p.rows)) for p in points]
    settled = store.write(store.path_of(layer, kind), kind, asked, sources)
    dispatcher.forget(None)
    return settled


def chosen(**changes: object) -> str:
    return dispatch("scratch", **{**FACTS, **changes}).spec.name  # type: ignore[arg-type]


def test_times_rank_before_priority(rows: str) -> None:
    """Catches: records that are written and never asked."""
    assert chosen() == "alpha/scratch"
    save(point({"alpha/scratch": 1.0, "beta/scratch": 0.5, "gamma/scratch": 0.7}))
    assert chosen() == "beta/scratch"
    assert [v.row.name for v in explain("scratch", **FACTS).rows][:3] == [NAMES[1], NAMES[2], NAMES[0]]


def test_what_is_named_goes_first(rows: str) -> None:
    """Catches: a measured time that overrules a row the caller names."""
    save(point({"alpha/scratch": 1.0, "beta/scratch": 0.5}))
    assert chosen(backend="alpha") == "alpha/scratch"


def test_a_fast_row_that_cannot_run_is_passed_over(rows: str) -> None:
    """Catches: a rank that forgets what a row requires; the next in measured order must follow."""
    registry.unregister("beta/scratch")
    registry.register(
        scratch.row("beta/scratch", f"{rows}:fast", priority=20, shape=Shape(require=(Dim("hidden", multiple_of=128),)))
    )
    save(point({"alpha/scratch": 1.0, "beta/scratch": 0.5, "gamma/scratch": 0.7}))
    assert chosen() == "gamma/scratch"


def test_rows_that_were_not_measured_keep_their_place(rows: str) -> None:
    """Catches: a new row that no run has timed and that falls behind the floor for it."""
    save(point({"beta/scratch": 1.0, "native/scratch": 0.5}))
    assert [v.row.name for v in explain("scratch", **FACTS).rows] == [
        *("alpha/scratch", "native/scratch", "gamma/scratch", "beta/scratch")
    ]


def test_what_is_no_time_of_the_row_sets_no_rank(rows: str) -> None:
    """Catches: rows ranked by how long the host took."""
    save(point({"alpha/scratch": 1.0, "beta/scratch": timing(0.5, 0.005, "host-bound")}))
    assert chosen() == "alpha/scratch"
    beta = next(v for v in explain("scratch", **FACTS).rows if v.row.name == "beta/scratch")
    assert beta.measured is not None
    assert beta.measured.place is None
    assert "host-bound" in str(beta.measured)


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ((timing(1.0, 0.0, "floor-limited"), 1.3, 1.2), "alpha/scratch"),
        ((timing(1.0, 0.0, "floor-limited"), timing(0.8, 0.005, "floor-limited"), 1.2), "alpha/scratch"),
        ((1.0, timing(0.5, 0.005, "floor-limited"), 0.8), "beta/scratch"),
        ((1.0, timing(0.5, 0.005, "floor-limited"), timing(0.4, 0.005, "floor-limited")), "beta/scratch"),
    ],
)
def test_a_row_at_the_floor_is_as_fast_as_any(rows: str, times: Sequence[float | Timing], winner: str) -> None:
    """Catches: the only row that takes longer than a launch chosen because it alone has a rank; rows ranked by what
    launching them took."""
    save(point(dict(zip(NAMES, times, strict=True))))
    assert chosen() == winner


def test_calls_as_short_as_a_launch_change_nothing(rows: str) -> None:
    """Catches: an order made of nothing but the floor."""
    flag = "floor-limited"
    (settled,) = save(point({"alpha/scratch": timing(1.0, 0.0, flag), "beta/scratch": timing(0.5, 0.0, flag)}))
    assert settled.order == ()
    assert chosen() == "alpha/scratch"


def test_undecided_times_keep_the_present_row(rows: str) -> None:
    """Catches: a lower median taken for a faster row though its interval reaches the other's."""
    save(point({"alpha/scratch": 1.0, "beta/scratch": timing(0.8, 0.3)}))
    assert chosen() == "alpha/scratch"
    save(point({"alpha/scratch": 1.0, "beta/scratch": timing(0.9, 0.01)}, reach=0.12))
    assert chosen() == "alpha/scratch"


def jittered(generator: random.Random, times: Mapping[str, float]) -> Point:
    """A run that measured every time up to 2 % wrong, so every ratio up to 4 %, and whose intervals say so."""
    wrong = {name: us * generator.uniform(0.98, 1.02) for name, us in times.items()}
    base = wrong["alpha/scratch"]
    return point({name: timing(us / base, 0.04) for name, us in wrong.items()} | {"alpha/scratch": Timing(1, 1, 1)})


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ((1.0, 1.0, 1.0), "alpha/scratch"),
        ((1.0, 0.99, 1.01), "alpha/scratch"),
        ((1.0, 0.5, 0.5), "beta/scratch"),
        ((1.0, 0.5, 0.495), "beta/scratch"),
        ((1.0, 0.9, 0.6), "gamma/scratch"),
    ],
)
def test_near_ties_never_flip(rows: str, times: Sequence[float], winner: str) -> None:
    """Catches P62: numerics that change from one tuning run to the next because two rows are about as fast."""
    generator = random.Random(0)
    named = dict(zip(NAMES, times, strict=True))
    firsts = {order(NAMES, jittered(generator, named).rows)[0] for _ in range(100)}
    assert firsts == {winner}
    for _ in range(100):
        save(jittered(generator, named))
        assert chosen() == winner


def test_the_present_order_is_remembered(rows: str) -> None:
    """Catches: hysteresis without memory, which returns to the row of the highest priority as soon as a lead shrinks; a
    row that is faster for sure must take the place all the same."""
    save(point({"alpha/scratch": 1.0, "beta/scratch": 0.9}))
    save(point({"alpha/scratch": 1.0, "beta/scratch": 0.995}))
    assert chosen() == "beta/scratch"
    save(point({"alpha/scratch": 1.0, "beta/scratch": 1.1}))
    assert chosen() == "alpha/scratch"


def test_an_order_holds_every_row_once() -> None:
    """Catches: a row lost or doubled; an order that depends on the order of the table."""
    generator = random.Random(1)
    for _ in range(300):
        names = [f"r{i}" for i in range(generator.randint(1, 6))]
        found = {name: timing(generator.uniform(0.5, 1.5), generator.uniform(0, 0.2)) for name in names}
        prior = generator.sample(names, generator.randint(0, len(names)))
        got = order(prior, found)
        assert sorted(got) == sorted(names)
        assert order(prior, dict(sorted(found.items(), reverse=True))) == got
        best = min(t.ratio for t in found.values())
        noise = max(t.high / t.low for t in found.values())
        assert found[got[0]].ratio / best <= noise**2 / 0.98**2


def test_a_point_speaks_for_its_bucket(rows: str) -> None:
    """Catches: a time at one shape taken for all; a bucket whose ends are off by one; the far point asked before the
    near one."""
    save(
        point({"alpha/scratch": 1.0, "beta/scratch": 0.5}, {"tokens": 5, "hidden": 64}),
        point({"alpha/scratch": 1.0, "beta/scratch": 1.0, "gamma/scratch": 0.5}, {"tokens": 8, "hidden": 64}),
    )
    got = {n: chosen(dims={"tokens": n, "hidden": 64}) for n in (1, 4, 5, 6, 7, 8, 9, 16)}
    alpha, beta, gamma = NAMES
    assert got == {1: alpha, 4: alpha, 5: beta, 6: beta, 7: gamma, 8: gamma, 9: alpha, 16: alpha}
    assert chosen(dims={"tokens": 5, "hidden": 65}) == alpha
    assert chosen(dtype="fp16") == "native/scratch"
    assert chosen(dims={"tokens": 5}) == alpha
    assert [store.bucket(n) for n in (0, 1, 2, 3, 4, 5, 1 << 20, (1 << 20) + 1)] == [0, 1, 2, 4, 4, 8, 1 << 20, 1 << 21]


def test_shapes_that_share_a_key_are_merged(rows: str) -> None:
    """Catches: the last of several context lengths deciding for all; a row faster at one and slower at another must
    not win."""
    fast = point({"alpha/scratch": 1.0, "beta/scratch": 0.5})
    slow = point({"alpha/scratch": 1.0, "beta/scratch": 1.5})
    both = merged([fast, slow]).rows["beta/scratch"]
    assert both.low < 0.5 < 1.5 < both.high
    save(fast, slow)
    assert chosen() == "alpha/scratch"
    save(fast, fast)
    assert chosen() == "beta/scratch"


def test_an_edited_row_has_no_times(rows: str, tmp_path: Path) -> None:
    """Catches P78 and its reverse: times that outlive the code that was measured, or die of a comment or a version."""
    save(point({"alpha/scratch": 1.0, "beta/scratch": 0.5}))
    path = tmp_path / f"{rows}.py"
    text = path.read_text()
    fast = 'CALLS.append("fast")'
    for edited, winner in (
        (text.replace(fast, f"{fast}  # noted"), "beta/scratch"),
        (f'__version__ = "9.9"\n{text}', "beta/scratch"),
        (text.replace(fast, f"{fast}; CALLS.clear()"), "alpha/scratch"),
        (text, "beta/scratch"),
    ):
        path.write_text(edited)
        store.forget()
        dispatcher.forget(None)
        assert chosen() == winner


def test_times_of_older_source_are_dropped(rows: str) -> None:
    """Catches: the same row ranked at one shape by what it was before."""
    save(point({"alpha/scratch": 1.0, "beta/scratch": 0.5}, {"tokens": 64, "hidden": 64}), digest="old", raw="old")
    save(point({"alpha/scratch": 1.0, "beta/scratch": 0.5}))
    table = store.table(USER, CPU)
    assert [dict(p.dims) for p in table.points] == [DIMS]


def test_the_users_times_come_before_shipped_ones(rows: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches: layers asked in the wrong order; shipped times that rank another package's row of the same name."""
    monkeypatch.setattr(records, "folder", lambda layer: tmp_path / layer)
    save(point({"alpha/scratch": 1.0, "beta/scratch": 0.5}), layer=SHIPPED)
    assert chosen() == "alpha/scratch"
    monkeypatch.setattr(registry, "is_shipped", lambda name: name in NAMES)
    store.forget()
    dispatcher.forget(None)
    assert chosen() == "beta/scratch"
    save(point({"alpha/scratch": 1.0, "beta/scratch": 1.0, "gamma/scratch": 0.5}))
    assert chosen() == "gamma/scratch"
    far = {"tokens": 128, "hidden": 64}
    save(point({"alpha/scratch": 1.0, "beta/scratch": 0.5}, far), layer=SHIPPED)
    assert chosen(dims=far) == "beta/scratch"


def test_only_the_devices_own_file_is_read(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: every device's times parsed at the start of a process, or those of another device asked."""
    save(point({"alpha/scratch": 1.0, "beta/scratch": 0.5}), kind="cuda test")
    read = []
    load = store.load
    monkeypatch.setattr(store, "load", lambda path, kind: (read.append(kind), load(path, kind))[1])
    assert chosen() == "alpha/scratch"
    assert set(read) == {CPU}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 9, "device": "cpu test"}', '{"format": 1}', "zero"])
def test_a_broken_file_is_reported_and_ignored(rows: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a half-written or foreign file of times that breaks every dispatch."""
    save(point({"alpha/scratch": 1.0, "beta/scratch": 0.5}))
    path = store.path_of(USER, CPU)
    path.write_text(path.read_text().replace("0.5,", "0,") if text == "zero" else text)
    store.forget()
    dispatcher.forget(None)
    with caplog.at_level(logging.WARNING):
        assert chosen() == "alpha/scratch"
    assert "ignored" in caplog.text


def test_explain_shows_the_numbers(rows: str) -> None:
    """Catches: a choice by numbers that nobody can see."""
    save(point({"alpha/scratch": 1.0, "beta/scratch": 0.5}, date="2026-12-01"))
    found = explain("scratch", **{**FACTS, "dims": {"tokens": 3, "hidden": 60}})
    assert found.selected == "beta/scratch"
    shown = found.json()["rows"][0]["measured"]  # type: ignore[index]
    assert (shown["us"], shown["place"], shown["exact"], shown["device"]) == (50.0, 0, False, CPU)
    assert json.dumps(found.json())
    text = str(found)
    assert "measured: 50 us cold on cpu test on 2026-12-01, measured at hidden=64, tokens=4" in text
    assert "2 times as long as beta/scratch" in text


def test_the_public_function_follows_the_shape(rows: str) -> None:
    """Catches: a fast path whose key leaves out the dimensions that times decide by, so that the first call's row
    answers for all shapes."""
    module = __import__(rows)
    function = codegen.public_function("scratch")
    weight = torch.ones(64)
    function(torch.ones(4, 64), weight)
    assert "input.shape[-1]" not in codegen._key(registry.get_op("scratch"))
    save(point({"alpha/scratch": 1.0, "native/scratch": 0.5}))
    for tokens, row in ((4, "native"), (64, "fast"), (3, "native")):
        module.CALLS.clear()
        function(torch.ones(tokens, 64), weight)
        assert [row] == module.CALLS, f"{tokens} tokens"


def test_rows_with_source_that_cannot_be_read_are_not_recorded(rows: str, tmp_path: Path) -> None:
    """Catches: times that no edit could ever make stale."""
    with pytest.raises(ValueError, match="alpha/scratch: its times cannot be recorded without its source"):
        store.write(tmp_path / "x.json", CPU, [point({"alpha/scratch": 1.0})], {})


def test_classes_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: times of one CPU or thread count that rank rows on another."""
    monkeypatch.setattr(store, "default_threads", lambda: 2)
    one = store.device_class("cpu")
    monkeypatch.setattr(store, "default_threads", lambda: 1)
    assert one is not None
    assert one.endswith(", 2 threads")
    assert store.device_class("cpu") == one.replace("2 threads", "1 thread")
    monkeypatch.setattr(records, "device_info", lambda device: DeviceInfo("cuda", 0, "NVIDIA H200", 90))
    assert store.device_class("cuda", 0) == "cuda sm_90 NVIDIA H200"


def test_the_shipped_files_are_whole() -> None:
    """Catches: a file of times that no process would read, or that speaks of rows that are not there."""
    import rapid_llm.kernels.ops  # noqa: F401

    names = {row.name for op in registry.ops() for row in registry.rows(op.id)}
    for path in store.folder(SHIPPED).glob("*.json"):
        kind = json.loads(path.read_text())["device"]
        table = store.load(path, kind)
        assert path.name == records.file_name(kind)
        assert table.points
        assert set(table.sources) <= names
        assert all(isinstance(source, Source) for source in table.sources.values())
