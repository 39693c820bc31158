"""`cpp/rope_kvcache_write`: what the conformance suite does not say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import cpp
from tests.kernels.fused_cache_write import check, make, refusals

pytestmark = pytest.mark.skipif(cpp.available() is not True, reason=f"C++ kernels: {cpp.available()}")


@pytest.fixture(scope="module")
def row() -> Callable[..., None]:
    """Built once, so that a broken compiler fails here, with its log."""
    from rapid_llm.kernels.ops.kvcache.rope_kvcache_write_cpp import rope_kvcache_write

    return rope_kvcache_write


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_one_projection(row: Callable[..., None], tokens: int, interleaved: bool) -> None:
    """Catches: a neighbour's heads read or written where query, key and value are views of one tensor."""
    call = make(tokens, device="cpu", dtype=torch.float32)
    before = call.copy()
    row(*call.args, interleaved=interleaved)
    check(call, before, interleaved=interleaved)


@pytest.mark.parametrize(
    ("name", "at", "wrong"), [("positions", 2, 30), ("positions", 0, -1), ("slots", 2, 64), ("slots", 0, 2**40)]
)
def test_position_or_slot_outside(row: Callable[..., None], name: str, at: int, wrong: int) -> None:
    """Catches: a read beyond the table, a write beyond the cache, half of the tokens done before the error."""
    call = make(3, device="cpu", dtype=torch.float32)
    getattr(call, name)[at] = wrong
    before = call.copy()
    with pytest.raises(IndexError, match=rf"rope_kvcache_write: {name[:-1]} {wrong} of token {at}"):
        row(*call.args)
    assert torch.equal(call.projection, before.projection)
    assert torch.equal(call.k_cache, before.k_cache)


def test_empty_cache_takes_padding(row: Callable[..., None]) -> None:
    """Catches: a division by a page size of 0 where every token is padding."""
    call = make(3, device="cpu", dtype=torch.float32)
    call.slots[:] = -1
    empty = torch.empty(0, 0, 3, 64)
    row(call.query, call.key, call.value, empty, empty.clone(), call.positions, call.table, call.slots)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        *refusals(),
        pytest.param(lambda c: (*c.args[:4], c.k_cache, *c.args[5:]), "k_cache overlaps v_cache", id="one cache"),
        pytest.param(lambda c: (c.query[..., ::2], *_halved(c)), "contiguous in its last dimension", id="stepped"),
        pytest.param(
            lambda c: (*(t.half() for t in c.args[:5]), *c.args[5:]),
            "must have dtype float32",
            id="another dtype of all",
        ),
        pytest.param(lambda c: (*(t.to("meta") for t in c.args),), "needs plain tensors", id="no memory"),
    ],
)
def test_refusals(row: Callable[..., None], change: Any, pattern: str) -> None:
    """Catches: memory read by another stride or type than it has, arguments that overlap."""
    call = make(3, device="cpu", dtype=torch.float32)
    args = change(call)
    before = call.copy()
    with pytest.raises(RuntimeError, match=pattern):
        row(*args)
    assert torch.equal(call.projection, before.projection)
    assert torch.equal(call.k_cache, before.k_cache)


def _halved(call: Any) -> tuple[Tensor, ...]:
    """Arguments after query for heads of half the width."""
    return (
        *(t[..., :32] for t in (call.key, call.value, call.k_cache, call.v_cache)),
        *(call.positions, call.table[:, :32].contiguous(), call.slots),
    )
