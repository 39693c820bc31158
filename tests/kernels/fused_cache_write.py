"""Calls of rope_kvcache_write as a decoder makes them, and wrong ones, for the tests of all its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from rapid_llm.verify import bounds
from rapid_llm.verify.compare import compare
from tests.reference import oracle

NAMES = ("query", "key", "value", "k_cache", "v_cache", "positions", "cos_sin_cache", "slot_mapping")
"""The op's arguments, in order."""


@dataclass
class Call:
    """Query, key and value are views of `projection` (tokens, 9 + 3 + 3 heads, 64)."""

    projection: Tensor
    k_cache: Tensor
    v_cache: Tensor
    positions: Tensor
    table: Tensor
    slots: Tensor

    def __post_init__(self) -> None:
        self.query, self.key, self.value = self.projection.split((9, 3, 3), 1)

    @property
    def args(self) -> tuple[Tensor, ...]:
        """In the op's order."""
        return (
            *(self.query, self.key, self.value, self.k_cache, self.v_cache),
            *(self.positions, self.table, self.slots),
        )

    def copy(self) -> Call:
        return Call(*(getattr(self, f.name).clone() for f in fields(self)))


def make(tokens: int, *, device: str, dtype: torch.dtype, seed: int = 0) -> Call:
    """The second of the tokens, if there are so many, is padding."""
    g = torch.Generator().manual_seed(seed)
    angle = torch.rand(30, 32, generator=g) * 6.0
    slots = torch.randperm(4 * 16, generator=g)[:tokens]
    slots[1:2] = -1
    k_cache, v_cache = torch.randn(2, 4, 16, 3, 64, generator=g).to(dtype).to(device)
    return Call(
        torch.randn(tokens, 15, 64, generator=g).to(dtype).to(device),
        k_cache.clone(),
        v_cache.clone(),
        torch.randint(0, 30, (tokens,), generator=g).to(device),
        torch.cat((angle.cos(), angle.sin()), 1).to(device),
        slots.to(device),
    )


def check(call: Call, before: Call, *, interleaved: bool = False) -> None:
    """Raise unless `call` holds what `before` gives by the oracle, within its bound, and value is as it was."""
    args = {name: t.cpu() for name, t in zip(NAMES, before.args, strict=True)} | {"interleaved": interleaved}
    expected = oracle("rope_kvcache_write")(**args)
    limits = bounds.rope_kvcache_write(args, expected)
    for name, truth, limit in zip(("query", "key", "k_cache", "v_cache"), expected, limits, strict=True):
        problem = compare(getattr(call, name).cpu(), truth, limit).problem
        assert problem is None, f"{name}: {problem}"
    assert torch.equal(call.value, before.value)


def _replace(**changes: Callable[[Call], Tensor]) -> Callable[[Call], tuple[Tensor, ...]]:
    names = ("query", "key", "value", "k_cache", "v_cache", "positions", "table", "slots")
    return lambda call: tuple(changes.get(n, lambda c, n=n: getattr(c, n))(call) for n in names)  # type: ignore[misc]


def refusals() -> list[Any]:
    """(change, pattern): arguments that every row must refuse with a RuntimeError that names the op, before it
    writes."""
    wrong: dict[str, tuple[Callable[[Call], tuple[Tensor, ...]], str]] = {
        "value of other heads": (_replace(value=lambda c: c.value[:, :1]), "same shape"),
        "cache of another width": (_replace(v_cache=lambda c: c.v_cache[..., :32]), "same shape"),
        "cache of other heads": (
            _replace(k_cache=lambda c: c.k_cache[:, :, :1], v_cache=lambda c: c.v_cache[:, :, :1]),
            "same shape",
        ),
        "query of other tokens": (_replace(query=lambda c: c.query[:2]), "same shape|positions"),
        "positions short": (_replace(positions=lambda c: c.positions[:1]), r"positions.*\(3,\)"),
        "positions as floats": (_replace(positions=lambda c: c.positions.float()), "positions must be int32 or int64"),
        "slots as int32": (_replace(slots=lambda c: c.slots.int()), "slot_mapping.*int64"),
        "slots short": (_replace(slots=lambda c: c.slots[:1]), "slot_mapping"),
        "table in half": (_replace(table=lambda c: c.table.half()), "cos_sin_cache must be float32"),
        "table too wide": (_replace(table=lambda c: c.table.repeat(1, 2)), "rotary_dim"),
        "table of odd width": (_replace(table=lambda c: c.table[:, :7].contiguous()), "rotary_dim"),
        "cache of another dtype": (_replace(k_cache=lambda c: c.k_cache.double()), "k_cache.*dtype"),
        "key within query": (_replace(key=lambda c: c.query[:, 2:5]), "overlaps key"),
        "value within key": (_replace(value=lambda c: c.key), "overlaps value"),
        "query expanded": (_replace(query=lambda c: c.query[:, :1].expand(3, 9, 64)), "share memory"),
        "cache expanded": (_replace(k_cache=lambda c: c.k_cache[:1].expand(4, 16, 3, 64)), "share memory"),
    }
    return [pytest.param(change, f"rope_kvcache_write.*({text})", id=name) for name, (change, text) in wrong.items()]
