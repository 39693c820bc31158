"""What the oracles have answered in this process: many tests run one row after another over the same cases."""

from __future__ import annotations

from rapid_llm.verify.truths import Truths

SHARED = Truths()
"""For ops of the package alone, whose oracle stays the one that its name stands for."""
