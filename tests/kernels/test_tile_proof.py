"""The proof of tuned tiles, on a kernel that really runs them."""

from __future__ import annotations

import pytest

from rapid_llm.kernels.ops.triton_support import INTERPRETED
from rapid_llm.tuning import tiles
from rapid_llm.tuning.calls import Call
from rapid_llm.tuning.tiles import Question, Task

ROW = "native/rmsnorm"
CALL = Call("rmsnorm", "fp32", None, {"tokens": 3, "hidden": 64})


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1, as `make test-interpreter` sets it")
def test_a_block_too_small_is_refused_by_the_proof() -> None:
    """Catches B51 where it matters: a candidate that leaves elements unwritten, believed by its proof."""
    (asked,) = tiles.questions(CALL, ROW, "cpu")
    assert asked.name == "rmsnorm"
    with pytest.raises(ValueError, match="element"):
        tiles.prove(Task("prove", CALL, ROW, "cpu", asked, {**asked.stated, "BLOCK": 32}), asked)
    other = Question("rmsnorm", {"hidden": 64, "itemsize": 4}, {"BLOCK": 1})
    assert "no call asks" in tiles.prove(Task("prove", CALL, ROW, "cpu", other, {"BLOCK": 2}), other)
