"""Cases of comm.dispatch and comm.combine with one rank. Several ranks are several processes: a test of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapid_llm.verify.cases.build import Case, Device, check_budget, integers, lay, normal, torch_dtype


def routed(g: torch.Generator, tokens: int, topk: int, experts: int, lost: float = 0.2) -> tuple[Tensor, Tensor]:
    """Ids and weights of random distinct experts; a share `lost` of the choices is -1, and one token has none."""
    ids = torch.rand(tokens, experts, generator=g).argsort(1)[:, :topk]
    ids = torch.where(torch.rand(ids.shape, generator=g) < lost, -1, ids)
    if tokens > 2:
        ids[1] = -1
    return ids, torch.rand(tokens, topk, generator=g) + 0.1


def comm_dispatch(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Tokens with and without experts, spare capacity, int32 and int64 ids, strided tensors, every kind of number."""
    del scheme
    kind = torch_dtype(dtype)

    def case(
        name: str,
        tokens: int,
        hidden: int = 32,
        topk: int = 3,
        *,
        spare: int = 5,
        index: torch.dtype = torch.int64,
        layout: str = "contiguous",
        into: str = "contiguous",
        lost: float = 0.2,
        **more: Any,
    ) -> Case:
        def make(g: torch.Generator) -> dict[str, Any]:
            ids, weights = routed(g, tokens, topk, max(8, topk), lost)
            rows = normal(g, (tokens, hidden), kind)
            if tokens and hidden:
                rows[0, 0], rows[tokens - 1, hidden - 1] = float("nan"), float("-inf")
            capacity = tokens + spare
            return {
                "input": lay(rows, layout, device),
                "topk_ids": lay(ids.to(index), layout, device),
                "topk_weights": lay(weights, layout, device),
                "recv": lay(normal(g, (capacity, hidden), kind), into, device),
                "recv_ids": lay(integers(g, (capacity, topk), 50, 90, index), into, device),
                "recv_weights": lay(normal(g, (capacity, topk), torch.float32), into, device),
                "recv_source": lay(integers(g, (capacity, 2), 50, 90, torch.int32), into, device),
                "num_experts": max(8, topk),
                "ranks": 1,
                "group": "",
            }

        return Case(f"{name}/{tokens}+{spare}x{hidden}/top {topk}/{layout}/{into}", make, **more)

    if not check_budget(budget):
        return [
            case("empty", 0),
            case("plain", 7, index=torch.int32),
            case("strided", 5, layout="stepped", into="sliced"),
            case("tight", 4, 33, 1, spare=0),
        ]
    return [
        case("empty", 0),
        case("no capacity", 0, spare=0),
        *(case("plain", t, h, k) for t, h, k in ((1, 64, 2), (17, 576, 8), (64, 128, 1), (5, 1, 1), (9, 33, 9))),
        case("all kept", 12, lost=0.0),
        case("all lost", 6, lost=1.0),
        case("tight", 9, spare=0),
        case("int32", 9, index=torch.int32),
        *(case("layout", 9, layout=n) for n in ("sliced", "stepped", "transposed", "offset")),
        *(case("into", 9, into=n) for n in ("sliced", "stepped", "transposed", "offset")),
        case("beyond 2^31", 4, 16, layout="far", seeds=1),
    ]


def comm_combine(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Rows in any order, rows of no source among them, tokens that get nothing back, strided tensors."""
    del scheme
    kind = torch_dtype(dtype)

    def case(
        name: str,
        tokens: int,
        rows: int,
        hidden: int = 32,
        *,
        spare: int = 4,
        layout: str = "contiguous",
        source: str = "contiguous",
        **more: Any,
    ) -> Case:
        def make(g: torch.Generator) -> dict[str, Any]:
            places = torch.randperm(tokens, generator=g)[:rows].to(torch.int32)
            table = torch.full((rows + spare, 2), -1, dtype=torch.int32)
            table[:rows, 0], table[:rows, 1] = 0, places
            values = normal(g, (rows + spare, hidden), kind)
            values[rows:] = float("nan")  # nobody's
            if rows > 1 and hidden:
                values[0, 0], values[1, hidden - 1] = float("inf"), float("nan")
            return {
                "input": lay(values, layout, device),
                "recv_source": lay(table, source, device),
                "tokens": tokens,
                "ranks": 1,
                "group": "",
            }

        return Case(f"{name}/{rows}+{spare} to {tokens}x{hidden}/{layout}/{source}", make, **more)

    if not check_budget(budget):
        return [
            case("empty", 0, 0),
            case("plain", 7, 5, outs=("strided",)),
            case("strided", 5, 5, layout="stepped", source="sliced"),
            case("nothing back", 3, 0),
        ]
    return [
        case("empty", 0, 0),
        case("no rows", 3, 0, spare=0),
        case("nothing back", 3, 0),
        *(
            case("plain", t, r, h, outs=("strided",))
            for t, r, h in ((1, 1, 64), (17, 12, 576), (64, 64, 128), (5, 2, 1))
        ),
        case("tight", 9, 9, spare=0),
        case("aliased", 9, 5, outs=("try is:input", "try overlap:input")),
        *(case("layout", 9, 7, layout=n) for n in ("sliced", "stepped", "transposed", "offset")),
        *(case("source", 9, 7, source=n) for n in ("sliced", "stepped", "transposed")),
        case("beyond 2^31", 4, 3, 16, layout="far", seeds=1),
    ]
