"""`aot/rope_kvcache_write`: what the conformance suite does not say, through the extension's wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapid_llm.kernels import registry
from tests.kernels.fused_cache_write import check, make, refusals
from tests.kernels.gpu_rows import need

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def write() -> Any:
    """The row's function, opened first; skips with the reason where it cannot run."""
    return need(registry.get_row("aot/rope_kvcache_write"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_one_projection(write: Any, tokens: int, interleaved: bool, dtype: torch.dtype) -> None:
    """Catches: arguments in another order than the launcher's; a neighbour's heads read or written."""
    call = make(tokens, device="cuda", dtype=dtype)
    before = call.copy()
    assert write(*call.args, interleaved=interleaved) is None
    check(call, before, interleaved=interleaved)


@pytest.mark.parametrize(("change", "pattern"), refusals())
def test_refusals(write: Any, change: Any, pattern: str) -> None:
    """Catches: memory read by another stride, type or device than it has."""
    with pytest.raises(RuntimeError, match=pattern):
        write(*change(make(3, device="cuda", dtype=torch.float32)))
