"""Cases of the elementwise ops: scale, silu_and_mul, gelu_and_mul."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rapid_llm.verify.cases.build import (
    Case,
    Device,
    check_budget,
    edges,
    every_bit_pattern,
    lay,
    normal,
    torch_dtype,
    wide,
)
from rapid_llm.verify.cases.families import EXTREME, FAMILIES

_SIZES = ((1,), (7,), (128,), (1024,), (4096,), (4097,), (65536,), (), (3, 5, 17), (2, 3, 2, 1, 5))
_LAYOUTS = ("offset", "sliced", "stepped", "transposed", "outer", "expanded")


def scale(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Sizes with tails and none, exact and inexact factors, every layout, every kind of number, aliased outputs."""
    del scheme
    kind = torch_dtype(dtype)

    def case(name: str, shape: tuple[int, ...], factor: float, layout: str = "contiguous", **more: Any) -> Case:
        def make(g: torch.Generator) -> dict[str, Any]:
            return {"input": lay(normal(g, shape, kind, 3.0), layout, device), "factor": factor}

        return Case(f"{name}/{layout}/{factor:g}", make, **more)

    def special(name: str, draw: Callable[[torch.Generator], Tensor], factor: float, **more: Any) -> Case:
        return Case(f"{name}/{factor:g}", lambda g: {"input": draw(g).to(device), "factor": factor}, **more)

    def edge_values(g: torch.Generator) -> Tensor:
        del g
        return edges(kind)

    aliased = ("strided", "is:input", "overlap:input")
    if not check_budget(budget):
        return [
            case("empty", (0, 8), 0.3),
            case("tail", (257,), 0.3, "offset", outs=aliased),
            case("rows", (3, 40), 2.0, "stepped"),
            case("rows", (5, 33), 0.3, "transposed"),
            case("rows", (4, 9), 0.3, "expanded"),
            case("four", (2, 3, 4, 5), 0.5, "outer"),
            case("parted", (2, 3, 16), 0.3, "parted", outs=("parted",)),
            special("edges", edge_values, 1.0),
        ]
    sizes = [case(f"size{'x'.join(map(str, s))}", s, 0.3, seeds=1) for s in _SIZES]
    empties = [case(f"empty{i}", s, 0.3) for i, s in enumerate(((0,), (0, 8), (8, 0), (2, 0, 3)))]
    factors = [case("factor", (1000,), f, outs=aliased) for f in (0.0, 0.5, 1.0, -1.7, 1e-3, 3e38, 1e-42)]
    layouts = [case("layout", (9, 7, 33), 0.3, name, outs=aliased[:1]) for name in _LAYOUTS]
    layouts += [case("layout", (5, 3, 64), 0.3, name, outs=("parted",)) for name in ("contiguous", "parted")]
    if torch.device(device).type == "cuda":  # so many that kernels give a thread several vectors
        layouts += [case("many", (2**21 + 8 * 1024 + 5,), 0.3, seeds=1)]
    numbers = (
        [special("edges", edge_values, f) for f in (1.0, 0.5, 0.3, -2.0, 1e30)]
        + [special("bits", lambda g: every_bit_pattern(g, 4096, kind), f) for f in (0.3, 0.5)]
        + [special("wide", lambda g: wide(g, (5000,), kind, -126, 127), f) for f in (0.3, 1.7)]
    )
    numbers += [
        special(f"{name}", lambda g, draw=draw: draw(g, (9, 130), kind), f)
        for name, draw in {**FAMILIES, **EXTREME}.items()
        for f in (0.3, 0.5)
    ]
    return [*empties, *sizes, *factors, *layouts, *numbers, case("beyond 2^31", (2, 40), 0.3, "far", seeds=1)]


def silu_and_mul(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Rows and features with tails, gates from saturated to tiny, layouts, special numbers on either side."""
    del scheme
    return _gated(dtype, device, budget)


def gelu_and_mul(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """As silu_and_mul, and gates over the whole of GELU's negative tail."""
    del scheme
    kind = torch_dtype(dtype)

    def tail(g: torch.Generator) -> dict[str, Any]:
        gate = torch.linspace(-9, 3, 97).to(kind)
        return {"input": torch.cat((gate, normal(g, (97,), kind, 2.0)))[None].to(device)}

    return [*_gated(dtype, device, budget), Case("tail", tail)]


def _gated(dtype: str, device: Device, budget: str) -> list[Case]:
    kind = torch_dtype(dtype)

    def case(name: str, shape: tuple[int, ...], layout: str = "contiguous", spread: float = 2.0, **more: Any) -> Case:
        def make(g: torch.Generator) -> dict[str, Any]:
            return {"input": lay(normal(g, (*shape[:-1], 2 * shape[-1]), kind, spread), layout, device)}

        return Case(f"{name}/{layout}", make, **more)

    def edge(g: torch.Generator, whole: int = 1) -> dict[str, Any]:
        """`whole`: the number of features is a multiple of it."""
        del g
        special = edges(kind)
        special = special[torch.isfinite(special) & (special.abs() < 1e4)]
        gate = torch.cat(
            (special, torch.tensor([88.0, -88.0, -104.0, 120.0, float("inf"), float("nan"), 1.0, 2.0]).to(kind))
        )
        gate = torch.cat((torch.ones(-len(gate) % whole, dtype=kind), gate))
        up = torch.ones_like(gate)
        up[-2:] = torch.tensor([float("nan"), float("inf")]).to(kind)
        return {"input": torch.stack((torch.cat((gate, up)), torch.cat((gate, -3 * up)))).to(device)}

    def saturated(g: torch.Generator) -> dict[str, Any]:
        gate = torch.linspace(-110, 110, 881).to(kind)
        return {"input": torch.cat((gate, normal(g, (881,), kind, 2.0)))[None].to(device)}

    strided = ("strided",)
    if not check_budget(budget):
        return [
            case("empty", (0, 16)),
            case("rows", (3, 65), "stepped", outs=strided),
            case("rows", (2, 40), "transposed"),
            case("one", (1, 7), "offset"),
            case("three", (2, 3, 24), "outer"),
            case("parted", (2, 3, 16), "parted", outs=("parted",)),
            case("same", (3, 9), "expanded"),
            Case("edges", edge),
        ]
    shapes = ((1, 1), (1, 1536), (3, 4097), (7,), (2, 5, 33), (33, 128), (1, 8193))
    return [
        *(case(f"empty{i}", s) for i, s in enumerate(((0, 16), (4, 0), (0,)))),
        *(case(f"shape{'x'.join(map(str, s))}", s, outs=strided) for s in shapes),
        *(case("layout", (6, 5, 34), name) for name in _LAYOUTS),
        case("parted", (5, 3, 64), "parted", outs=("parted",)),
        case("parted", (5, 64), "parted", outs=("parted",)),
        case("scattered", (2, 3, 4, 64), "outer", outs=("parted",)),
        *(case("many", s, seeds=1) for s in ((265, 64), (1059, 64))),
        case("many", (89, 3, 64), "parted", outs=("parted",), seeds=1),
        # So many that kernels give a thread several vectors.
        *([case("many", (265, 8200), seeds=1)] if torch.device(device).type == "cuda" else []),
        case("tiny", (4, 300), spread=1e-4),
        case("large", (4, 300), spread=60.0),
        Case("edges", edge),
        Case("edges of whole vectors", lambda g: edge(g, 16)),
        Case("saturated", saturated),
        *(
            Case(name, lambda g, draw=draw: {"input": draw(g, (6, 2 * 72), kind).to(device)})
            for name, draw in {**FAMILIES, **EXTREME}.items()
        ),
        case("beyond 2^31", (2, 40), "far", seeds=1),
    ]
