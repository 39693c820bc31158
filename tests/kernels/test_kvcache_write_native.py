"""`native/kvcache.write`: what the conformance suite does not say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rapid_llm.kernels.ops.kvcache.kvcache_write import _write_masked, kvcache_write
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from tests.kernels.devices import DEVICES

pytestmark = pytest.mark.interpreter

SLOTS = {
    "one": [37],
    "one, padding": [-1],
    "a run": list(range(16, 48)),
    "a run across pages": list(range(29, 35)),
    "a run from zero": [0, 1, 2],
    "backwards": [9, 8, 7],
    "scattered": [63, 2, 17],
    "padding amid": [5, -1, 6, -7, 40],
    "padding first": [-1, 3],
    "only padding": [-1, -1],
    "none": [],
}
LAYOUTS = ["contiguous", "key and value in one page", "heads before rows"]


def caches(layout: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    if layout == "key and value in one page":
        both = torch.full((4, 2, 16, 3, 8), -1.0, device=device)
        return both[:, 0], both[:, 1]
    if layout == "heads before rows":
        both = torch.full((2, 4, 3, 16, 8), -1.0, device=device)
        return both[0].transpose(1, 2), both[1].transpose(1, 2)
    both = torch.full((2, 4, 16, 3, 8), -1.0, device=device)
    return both[0], both[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("write", [kvcache_write, pytest.param(_write_masked, id="CUDA without Triton")])
def test_slots(device: str, layout: str, slots: str, write: Callable[..., None]) -> None:
    """Catches: padding that overwrites a slot, a run copied past a page's end, a layout assumed, K and V swapped."""
    wanted = SLOTS[slots]
    if write is _write_masked and not wanted:
        pytest.skip("its caller returns before that")
    key, value = torch.randn(2, len(wanted), 3, 8, device=device)
    k_cache, v_cache = caches(layout, device)
    write(key, value, k_cache, v_cache, torch.tensor(wanted, dtype=torch.int64, device=device))
    for source, cache in ((key, k_cache), (value, v_cache)):
        truth = torch.full((4, 16, 3, 8), -1.0, device=device)
        for i, slot in enumerate(wanted):
            if slot >= 0:
                truth[slot // 16, slot % 16] = source[i]
        assert torch.equal(cache, truth)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [[64], [3, 64], [63, 64]])
def test_slot_beyond(device: str, slots: list[int]) -> None:
    """Catches: a write beyond the cache. The CPU raises and writes nothing; CUDA, which cannot, skips the token."""
    key = torch.ones(len(slots), 3, 8, device=device)
    k_cache, v_cache = caches("contiguous", device)
    mapping = torch.tensor(slots, device=device)
    if device == "cpu" and not INTERPRETED:
        with pytest.raises(IndexError, match=r"kvcache\.write.*64"):
            kvcache_write(key, key, k_cache, v_cache, mapping)
        assert bool((k_cache == -1).all())
        return
    kvcache_write(key, key, k_cache, v_cache, mapping)
    assert int((k_cache == 1).sum()) == 24 * (len(slots) - 1)


def test_refusals() -> None:
    """Catches: shapes that broadcast into the cache, int32 slots, a cast on the way."""
    key = torch.ones(2, 3, 8)
    k_cache, v_cache = caches("contiguous", "cpu")
    slots = torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match=r"kvcache\.write.*same shape"):
        kvcache_write(key, key[:, :1], k_cache, v_cache, slots)
    with pytest.raises(RuntimeError, match=r"kvcache\.write.*same shape"):
        kvcache_write(key, key, k_cache, v_cache[..., :4], slots)
    with pytest.raises(RuntimeError, match=r"kvcache\.write.*slot_mapping.*int64"):
        kvcache_write(key, key, k_cache, v_cache, slots.int())
    with pytest.raises(RuntimeError, match=r"kvcache\.write.*slot_mapping"):
        kvcache_write(key, key, k_cache, v_cache, slots[:1])
    with pytest.raises(RuntimeError, match=r"kvcache\.write.*dtype"):
        kvcache_write(key.half(), key.half(), k_cache, v_cache, slots)
