"""Cases of the normalisations: rmsnorm, fused_add_rmsnorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapid_llm.verify.cases.build import Case, Device, check_budget, integers, lay, normal, torch_dtype
from rapid_llm.verify.cases.families import FAMILIES, Family
from rapid_llm.verify.ulp import format_of

_SHAPES = ((1, 1), (1, 576), (4, 64), (3, 577), (2, 4097), (33, 128), (2, 3, 48), (100,), (1, 8192))
_MANY = ((265, 64), (1059, 64), (265, 264))
"""Rows at which kernels take several to a block, the last of them not full; and several vectors of each to a thread."""

_LONG = ((1, 16392), (2, 33000))
"""Rows of more vectors than a block has threads, and than its registers hold."""

_LAYOUTS = ("offset", "sliced", "stepped", "transposed", "outer", "expanded")


def _large(kind: torch.dtype) -> float:
    """A size whose square, summed over a row, still fits fp32."""
    return 1e17 if format_of(kind).emax > 15 else 2e4


def _special(kind: torch.dtype) -> Tensor:
    """Rows of zeros, one NaN, NaN beside infinity, one outlier, and plain ones between them."""
    rows = torch.ones(6, 40)
    rows[0] = 0.0
    rows[1, 7] = float("nan")
    rows[2, 3], rows[2, 39] = float("inf"), float("nan")
    rows[3, 39] = _large(kind)
    rows[4] = torch.linspace(-2, 2, 40)
    return rows.to(kind)


def rmsnorm(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Rows and widths with tails, layouts of input and weight, sizes at which eps decides, weights of other dtypes."""
    del scheme
    kind = torch_dtype(dtype)

    def case(
        name: str,
        shape: tuple[int, ...],
        layout: str = "contiguous",
        *,
        spread: float = 1.0,
        eps: float | None = 1e-5,
        weight: torch.dtype = kind,
        weight_layout: str = "contiguous",
        **more: Any,
    ) -> Case:
        def make(g: torch.Generator) -> dict[str, Any]:
            args = {
                "input": lay(normal(g, shape, kind, spread), layout, device),
                "weight": lay(normal(g, shape[-1:], weight), weight_layout, device),
            }
            return args if eps is None else {**args, "eps": eps}

        return Case(f"{name}/{'x'.join(map(str, shape))}/{layout}", make, **more)

    def special(g: torch.Generator) -> dict[str, Any]:
        rows = _special(kind)
        return {"input": rows.to(device), "weight": normal(g, (40,), kind).to(device), "eps": 1e-5}

    def drawn(g: torch.Generator, draw: Family) -> dict[str, Any]:
        weight = normal(g, (136,), kind).to(device)
        return {"input": draw(g, (6, 136), kind).to(device), "weight": weight, "eps": 1e-5}

    strided = ("strided",)
    if not check_budget(budget):
        return [
            case("empty", (0, 16)),
            case("plain", (3, 65), outs=("strided", "try is:input", "try overlap:input")),
            case("small", (2, 40), "stepped", spread=1e-3, weight=torch.float32),
            case("plain", (4, 33), "transposed", weight_layout="stepped"),
            case("plain", (2, 3, 24), "outer", eps=None),
            case("same", (3, 20), "expanded"),
            case("parted", (2, 3, 16), "parted", outs=("parted",)),
            Case("special", special),
        ]
    others = [d for d in (torch.float32, torch.float16, torch.bfloat16) if d != kind]
    return [
        *(case(f"empty{i}", s) for i, s in enumerate(((0, 16), (0, 3, 8)))),
        *(case("plain", s, outs=strided) for s in _SHAPES),
        case("aliased", (5, 96), outs=("try is:input", "try overlap:input")),
        *(case("layout", (6, 5, 34), name, weight_layout="stepped") for name in _LAYOUTS),
        case("layout", (6, 33), weight_layout="offset"),
        *(case("weight", (5, 96), weight=w) for w in others),
        *(case("parted", (5, 3, 64), "parted", weight=w, outs=("parted",)) for w in (kind, *others)),
        case("parted", (5, 64), "parted", outs=("parted",)),
        case("scattered", (2, 3, 4, 64), "outer", outs=("parted",)),
        *(case("many", s, seeds=1) for s in _MANY),
        *(case("long", s, seeds=1) for s in _LONG),
        case("many", (89, 3, 64), "parted", outs=("parted",), seeds=1),
        case("default eps", (4, 100), eps=None, spread=1e-3),
        *(case("eps", (4, 100), eps=e, spread=s) for e, s in ((1e-6, 1e-3), (1e-5, 1e-3), (0.5, 1.0), (1e-12, 1e-5))),
        case("large", (4, 300), spread=_large(kind) / 10),
        *(Case(name, lambda g, draw=draw: drawn(g, draw)) for name, draw in FAMILIES.items()),
        Case("special", special),
        case("beyond 2^31", (2, 40), "far", seeds=1),
    ]


def fused_add_rmsnorm(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """As rmsnorm, with both tensors written; cancelling sums and sums that need more bits than the dtype has."""
    del scheme
    kind = torch_dtype(dtype)

    def case(
        name: str,
        shape: tuple[int, ...],
        layouts: tuple[str, str] = ("contiguous", "contiguous"),
        *,
        spread: float = 1.0,
        other: float = 1.0,
        eps: float | None = 1e-5,
        weight: torch.dtype = kind,
        **more: Any,
    ) -> Case:
        def make(g: torch.Generator) -> dict[str, Any]:
            args = {
                "input": lay(normal(g, shape, kind, spread), layouts[0], device),
                "residual": lay(normal(g, shape, kind, other), layouts[1], device),
                "weight": normal(g, shape[-1:], weight).to(device),
            }
            return args if eps is None else {**args, "eps": eps}

        return Case(f"{name}/{'x'.join(map(str, shape))}/{'+'.join(layouts)}", make, **more)

    def cancelling(g: torch.Generator) -> dict[str, Any]:
        big = integers(g, (5, 120), -100, 100, kind)
        small = (integers(g, (5, 120), -3, 3, torch.float32) / 8).to(kind)
        residual = (small.to(torch.float32) - big.to(torch.float32)).to(kind)
        return {"input": big.to(device), "residual": residual.to(device), "weight": normal(g, (120,), kind).to(device)}

    def special(g: torch.Generator) -> dict[str, Any]:
        rows = _special(kind)
        other = torch.zeros_like(rows)
        other[5, 0] = float("nan")
        weight = normal(g, (40,), kind).to(device)
        return {"input": rows.to(device), "residual": other.to(device), "weight": weight, "eps": 1e-5}

    def drawn(g: torch.Generator, draw: Family) -> dict[str, Any]:
        weight = normal(g, (136,), kind).to(device)
        pair = (draw(g, (6, 136), kind).to(device) for _ in range(2))
        return {**dict(zip(("input", "residual"), pair, strict=True)), "weight": weight, "eps": 1e-5}

    if not check_budget(budget):
        return [
            case("empty", (0, 16)),
            case("plain", (3, 65)),
            case("plain", (4, 33), ("stepped", "transposed"), weight=torch.float32),
            case("small", (2, 3, 24), ("outer", "contiguous"), spread=1e-3, other=1e-3, eps=None),
            case("parted", (2, 3, 16), ("parted", "parted")),
            Case("cancelling", cancelling),
            Case("special", special),
        ]
    others = [d for d in (torch.float32, torch.float16, torch.bfloat16) if d != kind]
    parted = (("parted", "contiguous"), ("contiguous", "parted"), ("parted", "parted"))
    pairs = (("offset", "contiguous"), ("sliced", "stepped"), ("transposed", "contiguous"), ("contiguous", "outer"))
    return [
        *(case(f"empty{i}", s) for i, s in enumerate(((0, 16), (0, 3, 8)))),
        *(case("plain", s) for s in _SHAPES),
        *(case("layout", (6, 5, 34), pair) for pair in pairs),
        *(case("parted", (5, 3, 64), pair) for pair in parted),
        *(case("parted", (5, 3, 64), ("parted", "parted"), weight=w) for w in others),
        case("scattered", (2, 3, 4, 64), ("outer", "parted")),
        *(case("many", s, seeds=1) for s in _MANY),
        *(case("long", s, seeds=1) for s in _LONG),
        case("many", (89, 3, 64), ("parted", "sliced"), seeds=1),
        *(case("uneven", (4, 300), spread=s) for s in (1e-2, 30.0)),
        *(case("small", (4, 100), spread=1e-3, other=1e-3, eps=e) for e in (1e-6, 1e-5, None)),
        case("large", (4, 300), spread=_large(kind) / 10, other=_large(kind) / 10),
        *(Case(name, lambda g, draw=draw: drawn(g, draw)) for name, draw in FAMILIES.items()),
        case("weight", (5, 96), weight=torch.bfloat16 if kind == torch.float32 else torch.float32),
        Case("cancelling", cancelling),
        Case("special", special),
        case("beyond 2^31", (2, 40), ("far", "far"), seeds=1),
    ]
