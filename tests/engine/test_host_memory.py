"""What is freed in one step is there for the next, without a page fault."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from rapid_llm.engine.host_memory import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "kept" else None
def step():
    blocks = [b"x" * (4 << 20) for _ in range(9)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator alone is set")


def faults(how: str, **env: str) -> tuple[str, int]:
    command = [sys.executable, "-c", FAULTS, how]
    done = subprocess.run(command, env={**os.environ, **env}, check=True, capture_output=True, text=True)
    kept, count = done.stdout.split()
    return kept, int(count)


def test_a_step_takes_up_the_memory_of_the_last_one() -> None:
    """Catches: activations that go back to the kernel after every step (9,216 pages of 4 KiB each time)."""
    kept, count = faults("kept")
    assert kept == "True"
    assert count < 200
    assert faults("left")[1] > 8 * 9216 // 2


def test_who_has_set_the_allocator_is_left_alone() -> None:
    """Catches: an engine that overrides what its user said of the allocator."""
    assert faults("kept", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
    assert faults("kept", GLIBC_TUNABLES="glibc.malloc.trim_threshold=131072")[0] == "False"
