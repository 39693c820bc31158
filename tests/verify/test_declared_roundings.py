"""Bounds of rows that flush subnormals, round a weight, or keep partial results of attention in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rapid_llm.verify import bounds, bounds_paged, oracles
from rapid_llm.verify.compare import compare
from rapid_llm.verify.rounding import FLUSH, TINY


def _flush(values: Tensor) -> Tensor:
    return torch.where(values.abs() < TINY, 0.0, values)


def _judge(op: str, args: dict[str, Any], got: Tensor, roundings: tuple[str, ...]) -> bool:
    expected = getattr(oracles, op)(**args)
    (bound, *_) = getattr(bounds_paged if op.startswith("attention") else bounds, op)(args, expected, roundings)
    wanted = expected if isinstance(expected, Tensor) else expected[0]
    return compare(got, wanted, bound, shared=bool(roundings)).problem is None


def test_a_flush_must_be_declared_and_covers_no_more() -> None:
    """Would go red if subnormal numbers might be lost undeclared, or if a declared flush excused a normal one."""
    gate = torch.full((1, 8), 2.0**-128)
    args = {"input": torch.cat((gate, torch.full((1, 8), 1.5)), 1).bfloat16()}
    nothing = torch.zeros(1, 8).bfloat16()
    assert not _judge("silu_and_mul", args, nothing, ())
    assert _judge("silu_and_mul", args, nothing, (FLUSH,))
    args["input"][:, :8] = 2.0**-110
    assert not _judge("silu_and_mul", args, nothing, (FLUSH,))


def test_rotations_that_flush() -> None:
    """Would go red as above; what is not rotated may never change."""
    query = torch.full((1, 1, 6), 2.0**-126).bfloat16()
    table = torch.tensor([[0.6, 0.6, 0.8, 0.8]])
    args = {"query": query, "key": query.clone(), "positions": torch.tensor([0]), "cos_sin_cache": table}
    rotated = oracles.rope(**args)[0]
    got = torch.cat((_flush(rotated[..., :4]), rotated[..., 4:]), -1).bfloat16()
    assert not _judge("rope", args, got, ())
    assert _judge("rope", args, got, (FLUSH,))
    got[..., 5] = 0.0
    assert not _judge("rope", args, got, (FLUSH,))


@pytest.mark.parametrize("op", ["rmsnorm", "fused_add_rmsnorm"])
def test_a_rounded_norm_weight_must_be_declared(op: str) -> None:
    """Would go red if an fp32 weight might be read as bf16 undeclared, or if the declaration covered two such steps."""
    g = torch.Generator().manual_seed(0)
    args = {"input": torch.randn(4, 64, generator=g), "weight": torch.randn(64, generator=g), "eps": 1e-5}
    if op == "fused_add_rmsnorm":
        args["residual"] = torch.zeros(4, 64)
    norm = getattr(oracles, op)(**{**args, "weight": args["weight"].bfloat16()})
    norm = (norm if isinstance(norm, Tensor) else norm[0]).float()
    assert not _judge(op, args, norm, ())
    assert _judge(op, args, norm, ("weight:bf16",))
    exact = getattr(oracles, op)(**args)
    exact = exact if isinstance(exact, Tensor) else exact[0]
    assert not _judge(op, args, (exact + 3 * (norm - exact)).float(), ("weight:bf16",))


def test_partial_results_must_be_declared() -> None:
    """Would go red if halves of a sequence might be kept in bf16 undeclared, or weights under that name."""
    g = torch.Generator().manual_seed(0)
    cache = [torch.randn(4, 16, 1, 64, generator=g).bfloat16().float() for _ in range(2)]
    args = {
        "query": torch.randn(1, 1, 64, generator=g),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "seq_lens": torch.tensor([64]),
        "block_table": torch.arange(4).view(1, 4),
        "scale": 0.125,
    }
    keys, values = (c.view(64, 64).double() for c in cache)
    weights = torch.softmax(keys @ args["query"].view(64).double() * 0.125, 0)
    halves = [(w @ v / w.sum(), w.sum()) for w, v in zip(weights.split(32), values.split(32), strict=True)]
    rounded = sum(half.bfloat16().double() * mass for half, mass in halves)
    assert not _judge("attention_decode", args, rounded.view(1, 1, 64).float(), ())
    assert _judge("attention_decode", args, rounded.view(1, 1, 64).float(), ("partials:bf16",))
    coarse = weights.bfloat16().double()
    probs = (coarse @ values / coarse.sum()).view(1, 1, 64).float()
    assert not _judge("attention_decode", args, probs, ())
    assert _judge("attention_decode", args, probs, ("probs:bf16",))
