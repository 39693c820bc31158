"""`aot/rope`: what the conformance suite does not say, through the extension's wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapid_llm.kernels import registry
from tests.kernels.fused_cache_write import make
from tests.kernels.gpu_rows import need
from tests.kernels.test_rope_jit import _check as check

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def rope() -> Any:
    """The row's function, opened first; skips with the reason where it cannot run."""
    return need(registry.get_row("aot/rope"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_one_projection(rope: Any, tokens: int, interleaved: bool, dtype: torch.dtype) -> None:
    """Catches: arguments in another order than the launcher's; a neighbour's heads written."""
    call = make(tokens, device="cuda", dtype=dtype)
    before = call.copy()
    assert rope(call.query, call.key, call.positions, call.table, interleaved=interleaved) is None
    check(call, before, interleaved=interleaved)


def test_refusals(rope: Any) -> None:
    """Catches: a table in another precision, overlapping arguments, memory on the CPU."""
    call = make(3, device="cuda", dtype=torch.float32)
    query, key, positions, table = call.query, call.key, call.positions, call.table
    for args, pattern in (
        ((query, key, positions, table.half()), r"rope.*float32"),
        ((query, query[:, 1:], positions, table), r"rope.*overlaps key"),
        ((query, key, positions.cpu(), table), r"rope.*CUDA"),
    ):
        with pytest.raises(RuntimeError, match=pattern):
            rope(*args)
