"""What surrounds a call under test."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from rapid_llm.verify.setting import PoisonedAllocations
from tests import warm

ROOT = Path(__file__).parents[2]


def test_memory_is_poisoned_in_both_ways() -> None:
    """Catches: a result that was left as the allocator gave it, taken for a right one by luck."""
    with PoisonedAllocations():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.ones(3, dtype=torch.int64)).max() < -1000
    with PoisonedAllocations(finite=True):
        assert torch.empty(3).isfinite().all()
    assert torch.zeros(3).sum() == 0


def test_a_check_does_not_wait_for_torchs_compiler() -> None:
    """Catches: seconds of imports at the first use of a row in a user's process, for a compiler that nobody called."""
    code = """
import sys
from rapid_llm.verify.conformance import check_row
assert check_row("scale", "native/scale", dtype="fp32", budget="interpret").ok
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([warm.executable(), "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr
