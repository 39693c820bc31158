"""The machine's record: threads never exceed what the process may really use (E93)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rapid_llm import platform


def test_threads_follow_the_affinity_of_the_process() -> None:
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{one}}}); from rapid_llm.platform import *; print(default_threads())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_threads_follow_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    info = platform.CPUInfo("x", (), physical_cores=64, affinity=64, quota=None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    for quota, threads in ((None, 64), (3.7, 3), (0.5, 1)):
        limited = platform.CPUInfo(info.model, info.isa, info.physical_cores, info.affinity, quota)
        monkeypatch.setattr(platform, "cpu_info", lambda limited=limited: limited)
        assert platform.default_threads() == threads


def test_quota_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert platform._v2_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert platform._v2_quota(tmp_path) is None
    (tmp_path / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    assert platform._v1_quota(tmp_path) is None


def test_the_cpu_device_has_no_sm() -> None:
    info = platform.device_info("cpu")
    assert (info.type, info.sm) == ("cpu", None)
    assert info.name == platform.cpu_info().model
