"""Cases of the ops of a mixture of experts on one rank: moe.topk and fused_moe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rapid_llm.verify.cases.build import Case, Device, check_budget, integers, lay, normal, torch_dtype, wide

Draw = Callable[[torch.Generator, tuple[int, ...], torch.dtype], Tensor]


def moe_topk(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Counts of experts that are no powers of two, all of them chosen, ties, NaN and infinities, strided logits."""
    del scheme
    kind = torch_dtype(dtype)

    def case(
        name: str,
        tokens: int,
        experts: int,
        k: int,
        *,
        renormalize: bool = True,
        layout: str = "contiguous",
        draw: Draw = normal,
        **more: Any,
    ) -> Case:
        def make(g: torch.Generator) -> dict[str, Any]:
            logits = draw(g, (tokens, experts), kind)
            return {"logits": lay(logits, layout, device), "k": k, "renormalize": renormalize}

        how = "renormalised" if renormalize else "plain"
        return Case(f"{name}/{tokens}x{experts}/{k} {how}/{layout}", make, **more)

    def sharp(g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return normal(g, shape, dtype, 40.0)

    def ties(g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        values = integers(g, shape, -1, 1, dtype)
        return torch.where(
            (values == 0) & (torch.rand(shape, generator=g) < 0.5), -values, values
        )  # zeros of both signs

    def special(g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A NaN, an infinity, minus infinities in part and in all, and a row without any."""
        values = normal(g, shape, dtype)
        values[0, 1] = float("nan")
        values[1, 2] = float("inf")
        values[2, : shape[1] - 1] = float("-inf")
        values[3] = float("-inf")
        values[4, 0], values[4, 2] = float("nan"), float("-inf")
        return values

    def far_apart(g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return wide(g, shape, dtype, -20, 14)

    if not check_budget(budget):
        return [
            case("empty", 0, 8, 2),
            case("plain", 9, 12, 3, renormalize=False, layout="sliced"),
            case("renormalised", 9, 16, 4, layout="transposed"),
            case("ties", 9, 5, 3, draw=ties),
            case("all", 3, 5, 5, renormalize=False),
            case("special", 6, 6, 4, draw=special),
            case("sharp", 8, 8, 2, draw=sharp, renormalize=False),
        ]
    both = (True, False)
    return [
        case("empty", 0, 8, 2),
        case("one expert", 4, 1, 1),
        *(
            case("sizes", t, e, k, renormalize=r)
            for t, e, k in ((1, 8, 2), (40, 128, 8), (33, 60, 4), (5, 257, 6), (17, 64, 1), (90, 16, 2))
            for r in both
        ),
        *(case("all", 9, 6, 6, renormalize=r) for r in both),
        *(case("ties", 40, e, 3, draw=ties, renormalize=r) for e in (4, 64) for r in both),
        *(case("special", 8, e, 4, draw=special, renormalize=r) for e in (6, 128) for r in both),
        *(case("sharp", 30, 16, 4, draw=sharp, renormalize=r) for r in both),
        *(case("far apart", 30, 16, 16, draw=far_apart, renormalize=r) for r in both),
        *(case("layout", 9, 24, 4, layout=n) for n in ("offset", "sliced", "stepped", "transposed", "expanded")),
        case("beyond 2^31", 2, 16, 2, layout="far", seeds=1),
    ]


def fused_moe(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Few tokens and many, one expert for all, experts that nobody chose (they hold NaN), choices of no expert, sizes
    with tails, strided tensors, a NaN in one token."""
    del scheme
    kind = torch_dtype(dtype)

    def case(
        name: str,
        tokens: int,
        sizes: tuple[int, int] = (48, 40),
        experts: int = 5,
        k: int = 2,
        *,
        used: int | None = None,
        absent: bool = False,
        layout: str = "contiguous",
        weights: str = "contiguous",
        index: str = "contiguous",
        exact: bool = False,
        special: bool = False,
        **more: Any,
    ) -> Case:
        """used: experts from the second on that may be chosen; others hold NaN. absent: some choices are of none."""
        hidden, inter = sizes

        def make(g: torch.Generator) -> dict[str, Any]:
            count = experts if used is None else used
            first = 0 if used is None else 1
            ids = torch.stack([torch.randperm(count, generator=g)[:k] for _ in range(tokens)]) if tokens else None
            ids = torch.zeros(0, k, dtype=torch.int32) if ids is None else (ids + first).to(torch.int32)
            shapes = ((experts, 2 * inter, hidden), (experts, hidden, inter))
            if exact:
                x = integers(g, (tokens, hidden), -2, 2, kind)
                pair = [integers(g, shape, -2, 2, kind) for shape in shapes]
            else:
                x = normal(g, (tokens, hidden), kind)
                pair = [normal(g, shape, kind, shape[-1] ** -0.5) for shape in shapes]
            for tensor in pair:
                unused = torch.ones(experts, dtype=torch.bool).index_fill_(0, ids.reshape(-1).long(), False)
                tensor[unused] = float("nan")
            if absent and tokens:
                ids[0, 0], ids[-1] = -1, experts
                if tokens > 2:
                    ids[1, k - 1] = 10**6
            if special:
                x[1, 3] = float("nan")
            factors = torch.rand(tokens, k, generator=g) - (0.2 if k > 1 else 0.0)
            return {
                "input": lay(x, layout, device),
                "gate_up": lay(pair[0], weights, device),
                "down": lay(pair[1], weights, device),
                "topk_weights": lay(factors, index, device),
                "topk_ids": lay(ids, index, device),
            }

        shape = f"{tokens}x{hidden}:{inter}/{k} of {experts}"
        return Case(f"{name}/{shape}/{layout}/{weights}/{index}", make, **more)

    strided = ("strided",)
    if not check_budget(budget):
        return [
            case("empty", 0),
            case("one", 1, (17, 9), 4, 2, layout="stepped", outs=strided),
            case("few", 5, (40, 24), 3, 2, weights="sliced", index="stepped", absent=True),
            case("one expert", 19, (16, 8), 3, 1, used=1),
            case("special", 3, (16, 24), 2, 2, special=True),
        ]
    return [
        case("empty", 0),
        case("no choices", 3, k=0),
        *(case("tokens", t, outs=strided) for t in (1, 2, 7, 33)),
        *(case("sizes", 6, s, 4, 2) for s in ((1, 1), (33, 65), (128, 96), (64, 130))),
        case("many experts", 9, (32, 16), 40, 6),
        case("all experts", 5, (32, 16), 4, 4),
        *(case("one expert", t, (32, 24), 3, 1, used=1) for t in (1, 20, 70)),
        case("two of many", 70, (32, 24), 9, 2, used=2),
        case("absent", 9, absent=True, outs=strided),
        case("absent", 1, k=1, absent=True),
        *(case("layout", 7, layout=n, outs=strided) for n in ("sliced", "stepped", "offset", "transposed")),
        *(case("layout", 7, weights=n) for n in ("sliced", "stepped", "offset", "transposed", "outer")),
        *(case("layout", 7, index=n) for n in ("sliced", "stepped", "transposed")),
        case("aliased", 6, outs=("try is:input", "try overlap:input")),
        case("exact", 9, (24, 16), exact=True),
        case("special", 4, special=True),
        case("many", 90, (64, 32), 6, 3, seeds=1),
        case("beyond 2^31", 3, (16, 8), 3, 2, weights="far", seeds=1),
        case("beyond 2^31", 2, (16, 8), 3, 2, layout="far", seeds=1),
    ]
