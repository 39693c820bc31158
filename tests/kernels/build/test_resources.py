"""How many compilers run at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from rapid_llm.kernels.build import BuildError, jobs, resources

GIB = 1 << 30


def files(root: Path, **content: str) -> Path:
    for name, text in content.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(resources, "cpu_info", lambda: type("Info", (), {"quota": None})())


@pytest.mark.parametrize(("memory", "expected"), [(8, 4), (1, 1), (0, 1), (1000, 64), (None, 64)])
def test_memory_bounds_the_jobs(
    many_cpus: None, monkeypatch: pytest.MonkeyPatch, memory: int | None, expected: int
) -> None:
    """P27: as many compilers as cores, and the host runs out of memory."""
    monkeypatch.setattr(resources, "free_memory", lambda: None if memory is None else memory * GIB)
    assert jobs(2 * GIB) == expected


@pytest.mark.parametrize(("given", "expected"), [("3", 3), ("1000", 8), ("1", 1)])
def test_max_jobs_lowers_and_never_raises(
    many_cpus: None, monkeypatch: pytest.MonkeyPatch, given: str, expected: int
) -> None:
    """P27: MAX_JOBS=1000 takes more memory than there is."""
    monkeypatch.setattr(resources, "free_memory", lambda: 16 * GIB)
    monkeypatch.setenv("MAX_JOBS", given)
    assert jobs() == expected


@pytest.mark.parametrize("given", ["0", "-1", "many", "1.5"])
def test_a_max_jobs_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Catches a setting that is silently ignored."""
    monkeypatch.setenv("MAX_JOBS", given)
    with pytest.raises(BuildError, match=f"MAX_JOBS='{given}'"):
        jobs()


def test_a_quota_of_cpu_time_bounds_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """P27: 64 cores are visible in a container that may use two."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(resources, "cpu_info", lambda: type("Info", (), {"quota": 1.5})())
    monkeypatch.setattr(resources, "free_memory", lambda: None)
    assert jobs() == 2


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    """P27: the limit of an outer group is not seen, or cache that can be dropped is taken for used memory."""
    proc = files(tmp_path / "proc", meminfo="MemTotal: 1 kB\nMemAvailable: 67108864 kB\n", self__cgroup="0::/a/b\n")
    group = files(
        tmp_path / "cgroup",
        a__memory_dot_max=str(8 * GIB),
        a__memory_dot_current=str(6 * GIB),
        a__memory_dot_stat=f"anon 1\ninactive_file {3 * GIB}\n",
        a__b__memory_dot_max="max",
        a__b__memory_dot_current=str(1 * GIB),
    )
    assert resources.free_memory(proc, group) == 5 * GIB
    files(tmp_path / "cgroup", memory_dot_max=str(4 * GIB), memory_dot_current="0")
    assert resources.free_memory(proc, group) == 4 * GIB


def test_the_first_version_of_control_groups_counts(tmp_path: Path) -> None:
    """P27 on hosts that still have it."""
    proc = files(tmp_path / "proc", meminfo="", self__cgroup="4:memory:/job\n1:cpu,cpuacct:/\n")
    group = files(
        tmp_path / "cgroup",
        memory__job__memory_dot_limit_in_bytes=str(2 * GIB),
        memory__job__memory_dot_usage_in_bytes=str(1 * GIB),
    )
    assert resources.free_memory(proc, group) == 1 * GIB


def test_an_unknown_system_has_no_limit(tmp_path: Path) -> None:
    """Catches a failure where there is no /proc."""
    assert resources.free_memory(tmp_path, tmp_path) is None
