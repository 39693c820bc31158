"""What a step must read of packed weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapid_llm.models.packing import PackedLinear


@pytest.mark.parametrize(("form", "expected"), [((64,), 64), ((100,), 100), ((400,), 100)])
def test_a_form_larger_than_what_was_loaded_does_not_count(form: tuple[int, ...], expected: int) -> None:
    """Catches: a row that reads weights in a larger form looking better for it, or a smaller form not being seen."""
    other: Any = torch.zeros(7, dtype=torch.uint8)
    handle: Any = None
    linear = PackedLinear("q4_0", None, ((handle, other), (handle, torch.zeros(form, dtype=torch.uint8))), nbytes=100)
    assert linear.read_bytes(1) == expected
    assert linear.read_bytes(0) == 7
