"""Cases of attention.mla_decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rapid_llm.verify.cases.build import Case, Device, check_budget, integers, lay, lay_heads, normal, torch_dtype
from rapid_llm.verify.cases.families import FAMILIES, Family

PAGE = 64
DEEPSEEK = (576, 512)
"""head_dim and value_dim of DeepSeek's models."""


def attention_mla_decode(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Lengths at page borders and 0, head counts, DeepSeek's and other sizes, strided caches, sharp weights, poisoned
    neighbours."""
    del scheme
    kind = torch_dtype(dtype)

    def case(
        name: str,
        lengths: Sequence[int],
        heads: int = 3,
        dims: tuple[int, int] = (40, 32),
        *,
        page: int = 16,
        layout: str = "contiguous",
        cache: str = "contiguous",
        table: str = "contiguous",
        spread: float = 1.0,
        scale: float | None = None,
        exact: bool = False,
        special: str = "",
        equal: bool = False,
        draw: Family | None = None,
        **more: Any,
    ) -> Case:
        dim, value_dim = dims

        def make(g: torch.Generator) -> dict[str, Any]:
            needed = [-(-n // page) for n in lengths]
            total = sum(needed) + 2
            free = [int(p) + 1 for p in torch.randperm(total - 1, generator=g)]
            rows = torch.full((total, page, 1, dim), float("nan"), dtype=kind)  # what nobody sees is NaN
            pages = torch.full((len(lengths), max([*needed, 1]) + 1), free.pop(), dtype=torch.int32)
            for i, length in enumerate(lengths):
                pages[i, : needed[i]] = torch.tensor([free.pop() for _ in range(needed[i])], dtype=torch.int32)
                slots = torch.arange(length)
                shape = (length, 1, dim)
                values = integers(g, shape, -15, 15, kind) if exact else normal(g, shape, kind, spread)
                if draw is not None and length:
                    values = draw(g, shape, kind)
                rows[pages[i].long()[slots // page], slots % page] = values
            shape = (len(lengths), heads, dim)
            query = integers(g, shape, -15, 15, kind) if exact else normal(g, shape, kind, spread)
            if draw is not None:
                query = draw(g, shape, kind)
            if equal:  # all scores are 0, all weights are exact, and the low bits of a mean are the store's alone
                query.zero_()
            if special == "query":
                query[0, 0, dim - 1] = float("nan")
            elif special:
                rows[int(pages[0, 0]), 0, 0, dim - 1 if special == "key" else 0] = float("nan")
            return {
                "query": lay_heads(query, layout, device),
                "kv_cache": lay(rows, cache, device),
                "seq_lens": torch.tensor(lengths, dtype=torch.int32).to(device),
                "block_table": lay(pages, table, device),
                "scale": dim**-0.5 if scale is None else scale,
                "value_dim": value_dim,
            }

        size = f"{heads}x{dim}:{value_dim}/page {page}/{layout}/{cache}/{table}"
        return Case(f"{name}/{','.join(map(str, lengths))}/{size}", make, **more)

    if not check_budget(budget):
        return [
            case("empty", ()),
            case("borders", (15, 0, 17), 2, outs=("strided",)),
            case("plain", (33,), layout="fused", cache="sliced", table="stepped"),
            case("sharp", (20,), spread=4.0),
            case("DeepSeek", (70, 1), 4, DEEPSEEK, page=PAGE),
            case("special", (18,), special="key"),
        ]
    aliased = ("try is:query", "try overlap:query")
    return [
        case("empty", ()),
        case("no heads", (5,), 0),
        case("borders", (1, 2, 15, 16, 17, 31, 32, 33), outs=("strided",)),
        case("padding", (0, 5, 0, 40)),
        case("all padding", (0, 0)),
        case("aliased", (20, 3), 3, (32, 32), outs=aliased),
        *(case("page", (37, 16, 1), page=p) for p in (1, 8, 128)),
        *(case("DeepSeek", (130, 64, 0, 63), h, DEEPSEEK, page=PAGE, outs=("strided",)) for h in (1, 16)),
        case("DeepSeek", (200, 65), 128, DEEPSEEK, page=PAGE, seeds=1),
        case("no rope", (100, 7), 4, (512, 512), page=PAGE),
        case("one value", (20, 3), dims=(8, 1)),
        case("long", (700, 3, 333), seeds=1),
        case("many", [(i * 7) % 50 for i in range(40)], seeds=1),
        *(case("layout", (20, 35), layout=n) for n in ("fused", "sliced", "stepped", "outer", "offset")),
        *(case("layout", (20, 35), cache=n) for n in ("offset", "sliced", "stepped", "outer")),
        *(case("table", (20, 35), table=n) for n in ("sliced", "stepped", "transposed")),
        case("sharp", (60, 17), spread=6.0),
        case("flat", (60, 17), spread=1e-3),
        case("exact scores", (60, 17), exact=True, scale=0.25),
        case("scale", (60, 17), scale=0.37),
        *(case(f"special {s}", (20, 33), special=s) for s in ("query", "key", "value")),
        *(case("DeepSeek", (70, 3), 2, DEEPSEEK, page=PAGE, layout=n, seeds=1) for n in ("sliced", "outer")),
        case("DeepSeek", (70, 3), 2, DEEPSEEK, page=PAGE, cache="sliced", seeds=1),
        *(
            case(f"DeepSeek, special {s}", (20,), 2, DEEPSEEK, page=PAGE, special=s, seeds=1)
            for s in ("query", "key", "value")
        ),
        case("equal", (16, 8, 4, 1), equal=True),
        *(case(name, (20, 3), 2, DEEPSEEK, page=PAGE, draw=draw, seeds=1) for name, draw in FAMILIES.items()),
        case("equal", (16, 8, 4, 1), 2, DEEPSEEK, page=PAGE, equal=True),
        case("beyond 2^31", (20, 18), cache="far", seeds=1),
    ]
