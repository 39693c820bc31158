"""The state of the machine: who else is busy, whether threads behave, and what the memory gives."""

from __future__ import annotations

import json
import os

import pytest

from rapid_llm.bench import (
    LoadWatch,
    MachineBusyError,
    ResolutionError,
    SlowThreadsError,
    machine,
    machine_record,
    machine_slug,
    read_bandwidth,
    require_idle,
    require_normal_threads,
)
from rapid_llm.bench.bandwidth import last_cache_bytes
from rapid_llm.bench.load import Snapshot, _busy_seconds
from rapid_llm.platform import CPUInfo
from tests.bench.fakes import FakeClock, FakeMachine


def test_a_busy_machine_is_refused_with_figure_and_way_out() -> None:
    """Catches: a benchmark that measures its neighbours."""
    machine = FakeMachine(others=[0.8])
    with pytest.raises(MachineBusyError, match=r"0\.80 CPUs \(limit 0\.15\).*--force-busy"):
        require_idle(snapshot=machine.snapshot, sleep=machine.sleep, patience=2.0)
    assert machine.slept == 4


def test_it_waits_for_a_neighbour_to_finish() -> None:
    """Catches: a refusal because of a burst of half a second."""
    machine = FakeMachine(others=[0.9, 0.9, 0.02])
    assert require_idle(snapshot=machine.snapshot, sleep=machine.sleep).others == pytest.approx(0.02)


def test_forced_measurements_keep_the_load_they_saw() -> None:
    """Catches: a forced result that looks like a quiet one."""
    machine = FakeMachine(others=[0.8])
    assert require_idle(snapshot=machine.snapshot, sleep=machine.sleep, force=True).others == pytest.approx(0.8)


def test_our_own_work_is_not_counted_as_others() -> None:
    """Catches: a watch over a benchmark that calls the benchmark itself a disturbance."""
    machine = FakeMachine(others=[0.05], own=1.9)
    watch = LoadWatch(machine.snapshot)
    machine.sleep(10.0)
    assert watch.stop().others == pytest.approx(0.05)


def test_unknown_load_is_said_to_be_unknown() -> None:
    """Catches: a system without /proc read as an idle one."""
    snapshots = iter([Snapshot(0.0, None, 0.0), Snapshot(1.0, None, 0.0)])
    assert require_idle(snapshot=lambda: next(snapshots), sleep=lambda _: None).others is None


def test_busy_seconds_count_only_cpus_we_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a neighbour on another CPU counted, idle and IO wait counted, stolen time not counted."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    stat = "cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 900 0 0 0 0 0 0 0 0 0\ncpu1 100 10 40 5000 700 0 20 30 0 0\nintr 5\n"
    assert _busy_seconds(stat) == pytest.approx(2.0)
    assert _busy_seconds("") is None


def test_slow_threads_are_detected_and_retried() -> None:
    """Catches: a whole run of figures taken while each threaded operation costs 8 ms."""
    clock, pauses = FakeClock(), []
    with pytest.raises(SlowThreadsError, match=r"takes 7\.87 ms \(limit 3 ms\) in 3 tries"):
        require_normal_threads(clock.work(7_870_000), clock=clock, sleep=pauses.append)
    assert pauses == [1.0, 1.0]


def test_threads_that_recover_are_accepted() -> None:
    """Catches: a process given up although the state has passed."""
    clock = FakeClock()
    costs = iter([8_000_000] * 16 + [200_000] * 100)

    def op() -> None:
        clock.now += next(costs)

    assert require_normal_threads(op, clock=clock, sleep=lambda _: None).median == pytest.approx(0.2)


def test_one_slow_sample_is_no_slow_state() -> None:
    clock = FakeClock()
    costs = iter([200_000] * 5 + [50_000_000] + [200_000] * 100)

    def op() -> None:
        clock.now += next(costs)

    summary = require_normal_threads(op, clock=clock, sleep=lambda _: None)
    assert (summary.median, summary.max) == (pytest.approx(0.2), pytest.approx(50.0))


def test_bandwidth_is_bytes_over_the_fastest_pass() -> None:
    """Catches: bits for bytes, GiB for GB, the first or the slowest pass taken."""
    clock = FakeClock()
    passes = {"slow": clock.work(200_000), "quick": clock.work(50_000)}
    found = read_bandwidth(buffer_bytes=1_000_000, passes=passes, clock=clock)
    assert (found.bytes_per_second, found.by, found.buffer_bytes) == (2e10, "quick", 1_000_000)
    with pytest.raises(ResolutionError, match="took no time"):
        read_bandwidth(buffer_bytes=4096, passes={"none": lambda: None}, clock=clock)
    with pytest.raises(ValueError, match="rounds=0"):
        read_bandwidth(rounds=0)


def test_the_real_passes_read_the_whole_buffer() -> None:
    """Catches: a pass that reads half the buffer, which would double the figure."""
    found = read_bandwidth(buffer_bytes=8 << 20, rounds=1)
    assert found.by in {"sum of rows", "sum of integers", "dot"}
    assert 1e8 < found.bytes_per_second < 1e13


def test_last_cache_is_the_largest(tmp_path) -> None:
    for index, text in enumerate(["32K\n", "1024K\n", "32M\n"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(text)
    assert last_cache_bytes(tmp_path) == 32 << 20
    assert last_cache_bytes(tmp_path / "nothing") == 32 << 20


def test_the_record_says_where_and_with_what() -> None:
    """Catches: a result file nobody can place."""
    record = json.loads(json.dumps(machine_record()))
    assert record["cpu"]["model"]
    assert record["versions"]["python"]
    assert record["threads"] >= 1
    assert record["date"].endswith("+00:00")
    assert record["slug"] == machine_slug()
    assert set(record["slug"]) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_cpus_of_one_name_and_two_widths_have_two_slugs(monkeypatch) -> None:
    """Catches: a result of an AVX2 machine overwritten by that of an AVX-512 machine which reports the same model."""
    monkeypatch.setattr(machine, "_gpus", list)
    slugs = []
    for isa in (("avx2",), ("avx2", "avx512f")):
        monkeypatch.setattr(machine, "cpu_info", lambda isa=isa: CPUInfo("AMD EPYC", isa, 2, 2, None))
        slugs.append(machine_slug())
    assert slugs == ["amd-epyc-avx2-2-core", "amd-epyc-avx512f-2-core"]
