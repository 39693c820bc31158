"""Cases of rope."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rapid_llm.verify.cases.build import Case, Device, check_budget, lay, lay_heads, normal, torch_dtype
from rapid_llm.verify.cases.families import FAMILIES, Family


def rotary_table(g: torch.Generator, positions: int, rotary: int) -> Tensor:
    """Cosines and sines of angles that differ for every position and pair; position 0 does not rotate."""
    angles = torch.rand(positions, rotary // 2, generator=g, dtype=torch.float64) * (2 * math.pi)
    angles[0] = 0.0
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(torch.float32)


def rope(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Both pairings, partial rotation, GQA, repeated and extreme positions, strided heads, overflowing products."""
    del scheme
    kind = torch_dtype(dtype)

    def values(g: torch.Generator, shape: tuple[int, ...], spread: float, draw: Family | None) -> Tensor:
        return normal(g, shape, kind, spread) if draw is None else draw(g, shape, kind)

    def case(
        name: str,
        tokens: int,
        heads: tuple[int, int],
        dim: int,
        *,
        rotary: int | None = None,
        layout: str = "contiguous",
        interleaved: bool = False,
        table: int = 50,
        index: torch.dtype = torch.int64,
        other: str = "contiguous",
        spread: float = 1.0,
        draw: Family | None = None,
        **more: Any,
    ) -> Case:
        def make(g: torch.Generator) -> dict[str, Any]:
            positions = torch.randint(0, table, (tokens,), generator=g)
            if tokens > 2:
                positions[0], positions[-1] = 0, table - 1
            return {
                "query": lay_heads(values(g, (tokens, heads[0], dim), spread, draw), layout, device),
                "key": lay_heads(values(g, (tokens, heads[1], dim), spread, draw), layout, device),
                "positions": lay(positions.to(index), "stepped" if other != "contiguous" else other, device),
                "cos_sin_cache": lay(rotary_table(g, table, rotary or dim), other, device),
                "interleaved": interleaved,
            }

        pairing = "interleaved" if interleaved else "halves"
        return Case(f"{name}/{tokens}x{heads[0]}:{heads[1]}x{dim}/{layout}/{pairing}", make, **more)

    def special(g: torch.Generator, dim: int = 16) -> dict[str, Any]:
        query = normal(g, (5, 2, dim), kind)
        query[1, 0, 3] = float("nan")
        query[2, 1, 9] = float("inf")
        query[3] = torch.finfo(kind).max  # some rotations overflow
        query[4] = torch.finfo(kind).tiny
        table = rotary_table(g, 8, dim).to(device)
        positions = torch.tensor([0, 1, 2, 3, 7], device=device)
        args = {"query": query.to(device), "key": query[:, :1].clone().to(device), "positions": positions}
        return {**args, "cos_sin_cache": table}

    if not check_budget(budget):
        return [
            case("empty", 0, (4, 2), 16),
            case("plain", 3, (3, 1), 16, layout="fused"),
            case("plain", 3, (2, 2), 24, rotary=16, interleaved=True, index=torch.int32),
            case("plain", 5, (2, 1), 16, layout="outer", interleaved=True, other="sliced"),
            case("plain", 2, (2, 1), 20, layout="stepped"),
            case("parted", 3, (3, 2), 16, layout="parted"),
            Case("special", special),
        ]
    both = (False, True)
    tables, many = ("contiguous", "sliced"), ((265, False), (1059, True))
    return [
        case("empty", 0, (4, 2), 16),
        *(case("plain", t, h, d, interleaved=i) for t, h, d in ((1, (9, 3), 64), (7, (1, 1), 2)) for i in both),
        *(case("plain", 33, (8, 1), 128, interleaved=i, table=8192, seeds=1) for i in both),
        *(case("partial", 6, (4, 2), 80, rotary=r, interleaved=i) for r in (2, 32, 78) for i in both),
        *(case("layout", 9, (6, 2), 32, layout=n) for n in ("fused", "sliced", "stepped", "outer", "offset")),
        *(case("layout", 9, (6, 2), 32, layout=n, interleaved=True) for n in ("fused", "stepped", "outer")),
        *(case("parted", 9, (6, 2), 64, layout="parted", other=o, interleaved=i) for o in tables for i in both),
        *(case("many", t, (3, 1), 32, layout="parted", interleaved=i, seeds=1) for t, i in many),
        case("table", 9, (4, 4), 48, other="sliced", index=torch.int32),
        case("int32", 5, (3, 3), 64, index=torch.int32),
        case("large", 9, (3, 1), 64, spread=2e4),
        *(case(name, 7, (3, 1), 64, draw=draw, interleaved=i) for name, draw in FAMILIES.items() for i in both),
        Case("special", special),
        Case("model, special", lambda g: special(g, 64)),
        *(case("model", 9, (3, 1), 64, layout=n, interleaved=i) for n in ("fused", "sliced", "outer") for i in both),
        case("beyond 2^31", 2, (2, 1), 16, layout="far", seeds=1),
    ]
