"""`native/rope_kvcache_write`: what the conformance suite does not say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapid_llm.kernels.ops.kvcache.kvcache_write import kvcache_write
from rapid_llm.kernels.ops.kvcache.rope_kvcache_write import rope_kvcache_write
from rapid_llm.kernels.ops.rope.rope import rope
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from tests.kernels.devices import DEVICES
from tests.kernels.fused_cache_write import Call, make, refusals

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_equals_the_two_ops_on_one_projection(device: str, tokens: int, interleaved: bool) -> None:
    """Catches: key and cache that differ in a bit, value's heads rotated with key's, a padding token left as it was."""
    call = make(tokens, device=device, dtype=torch.float32)
    apart = call.copy()
    rope_kvcache_write(*call.args, interleaved=interleaved)
    rope(apart.query, apart.key, apart.positions, apart.table, interleaved=interleaved)
    kvcache_write(apart.key, apart.value, apart.k_cache, apart.v_cache, apart.slots)
    for name in ("projection", "k_cache", "v_cache"):
        assert torch.equal(getattr(call, name), getattr(apart, name)), name


@pytest.mark.parametrize("device", DEVICES)
def test_position_and_slot_outside(device: str) -> None:
    """Catches: a read beyond the table, a write beyond the cache. The CPU raises; CUDA marks the token, or skips it."""
    call = make(3, device=device, dtype=torch.float32)
    call.positions[1] = call.table.shape[0]
    far = make(3, device=device, dtype=torch.float32)
    far.slots[0] = 4 * 16
    if device == "cpu" and not INTERPRETED:
        for wrong in (call, far):
            with pytest.raises(IndexError):
                rope_kvcache_write(*wrong.args)
        return
    rope_kvcache_write(*call.args)
    assert bool(call.query[1].isnan().all())
    assert bool(call.query[0].isfinite().all())
    before = far.k_cache.clone()
    rope_kvcache_write(*far.args)
    assert int((far.k_cache != before).any(-1).any(-1).sum()) == 1  # of three tokens one is padding, one beyond


@pytest.mark.parametrize(("change", "pattern"), refusals())
def test_refusals(change: Any, pattern: str) -> None:
    """Catches: shapes that broadcast into the cache, another precision of table or slots, arguments that overlap."""
    call: Call = make(3, device="cpu", dtype=torch.float32)
    args = change(call)
    before = call.projection.clone()
    with pytest.raises(RuntimeError, match=pattern):
        rope_kvcache_write(*args)
    assert torch.equal(call.projection, before)
