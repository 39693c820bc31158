"""Cases of rope_kvcache_write."""

from __future__ import annotations

from typing import Any

import torch

from rapid_llm.verify.cases.build import Case, Device, check_budget, lay, lay_heads, normal, torch_dtype
from rapid_llm.verify.cases.families import FAMILIES, Family, e4m3_ties
from rapid_llm.verify.cases.paged import PAGE, lay_cache
from rapid_llm.verify.cases.rope import rotary_table
from rapid_llm.verify.ulp import E4M3


def rope_kvcache_write(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Both pairings, partial rotation, odd widths, padding, slots at page borders, strided heads and caches, NaN,
    caches of e4m3."""
    del scheme
    kind = torch_dtype(dtype)

    def case(
        name: str,
        tokens: int,
        heads: tuple[int, int],
        dim: int,
        *,
        rotary: int | None = None,
        interleaved: bool = False,
        padding: int = 0,
        page: int = PAGE,
        pages: int = 4,
        layout: str = "contiguous",
        cache: str = "contiguous",
        other: str = "contiguous",
        index: torch.dtype = torch.int64,
        table: int = 40,
        spread: float = 1.0,
        special: bool = False,
        draw: Family | None = None,
        fp8: bool = False,
        **more: Any,
    ) -> Case:
        pages, stored = max(pages, -(-tokens // page) + 1), E4M3 if fp8 else kind

        def make(g: torch.Generator) -> dict[str, Any]:
            slots = torch.randperm(pages * page, generator=g)
            if tokens > 2:  # slots on both sides of a page border, and the last one of all
                borders = torch.tensor([page - 1, page, pages * page - 1])
                slots = torch.cat((borders, slots[~torch.isin(slots, borders)]))
            slots = slots[:tokens][torch.randperm(tokens, generator=g)]
            slots[torch.randperm(tokens, generator=g)[:padding]] = -1
            if padding > 1:
                slots[int(torch.nonzero(slots < 0)[0])] = -(2**40)
            positions = torch.randint(1, table, (tokens,), generator=g)
            if tokens > 2:
                positions[0], positions[-1] = 0, table - 1
            query, key, value = (normal(g, (tokens, h, dim), kind, spread) for h in (*heads, heads[1]))
            if draw is not None:
                query, key, value = (draw(g, t.shape, kind) for t in (query, key, value))
            if special:
                query[0, 0, 0], key[1, 0, 1], value[2, 0, 0] = float("nan"), float("inf"), float("-inf")
                query[2], key[2], value[1, 0, 1] = torch.finfo(kind).max, torch.finfo(kind).tiny, float("nan")
            shape = (pages, page, heads[1], dim)
            stepped = "contiguous" if other == "contiguous" else "stepped"
            return {
                "query": lay_heads(query, layout, device),
                "key": lay_heads(key, layout, device),
                "value": lay_heads(value, layout, device),
                "k_cache": lay_cache(shape, stored, cache, device, normal(g, shape, kind)),
                "v_cache": lay_cache(shape, stored, cache, device, normal(g, shape, kind)),
                "positions": lay(positions.to(index), stepped, device),
                "cos_sin_cache": lay(rotary_table(g, table, rotary or dim), other, device),
                "slot_mapping": lay(slots, stepped, device),
                "interleaved": interleaved,
            }

        pairing = "interleaved" if interleaved else "halves"
        sizes = f"{tokens}x{heads[0]}:{heads[1]}x{dim}/page {page}"
        return Case(f"{name}/{sizes}/{layout}/{cache}/{pairing}", make, **more)

    if not check_budget(budget):
        return [
            case("empty", 0, (4, 2), 16),
            case("plain", 3, (3, 1), 16, layout="fused", padding=1),
            case("partial", 4, (2, 2), 24, rotary=16, interleaved=True, padding=2, cache="paired", index=torch.int32),
            case("page", 3, (2, 1), 14, page=1, layout="stepped", other="sliced"),
            case("parted", 3, (3, 2), 16, layout="parted", cache="parted"),
            case("special", 5, (2, 1), 16, special=True),
            case("fp8", 5, (3, 1), 24, rotary=16, layout="fused", padding=1, draw=e4m3_ties, fp8=True),
            case("fp8", 3, (2, 1), 16, cache="paired", interleaved=True, spread=100.0, fp8=True),
        ]
    both, caches = (False, True), ("contiguous", "paired", "parted")
    return [
        case("empty", 0, (4, 2), 16),
        *(case("plain", t, h, d, interleaved=i) for t, h, d in ((1, (9, 3), 64), (7, (1, 1), 2)) for i in both),
        *(case("plain", 33, (8, 2), 128, interleaved=i, table=8192, seeds=1) for i in both),
        *(case("partial", 6, (4, 2), 80, rotary=r, interleaved=i, padding=1) for r in (2, 32, 78) for i in both),
        *(case("width", 5, (3, 1), d, interleaved=i) for d in (6, 24, 36) for i in both),
        case("rest of odd width", 5, (3, 1), 13, rotary=8),
        case("padding", 12, (3, 3), 64, padding=5),
        case("all padding", 4, (2, 2), 16, padding=4),
        *(case("page", 9, (2, 2), 32, page=p) for p in (1, 8, 256)),
        *(case("layout", 9, (6, 2), 32, layout=n) for n in ("fused", "sliced", "stepped", "outer", "offset")),
        *(case("layout", 9, (6, 2), 32, layout=n, interleaved=True) for n in ("fused", "outer")),
        *(case("layout", 9, (3, 3), 32, cache=n) for n in ("paired", "offset", "sliced", "outer", "transposed")),
        *(case("parted", 9, (6, 2), 64, layout="parted", cache=n, padding=1) for n in caches),
        case("parted", 9, (6, 2), 64, layout="parted", cache="parted", other="sliced", interleaved=True),
        case("many", 265, (3, 1), 32, layout="parted", cache="parted", padding=2, seeds=1),
        case("many", 1059, (3, 1), 32, interleaved=True, padding=2, seeds=1),
        case("table", 9, (4, 4), 48, other="sliced", index=torch.int32),
        case("int32", 5, (3, 3), 64, index=torch.int32, padding=1),
        case("large", 9, (3, 1), 64, spread=2e4),
        *(case("special", 5, (2, 2), 16, special=True, interleaved=i) for i in both),
        *(case(name, 7, (3, 1), 64, draw=draw, padding=1) for name, draw in FAMILIES.items()),
        *(case("fp8", 17, (6, 2), 64, interleaved=i, padding=2, draw=e4m3_ties, fp8=True) for i in both),
        *(
            case("fp8", 17, (6, 2), 80, rotary=32, interleaved=i, spread=s, fp8=True)
            for s in (2.0**-8, 200.0)
            for i in both
        ),
        *(case("fp8", 9, (3, 3), 32, cache=n, fp8=True) for n in ("paired", "offset", "sliced", "outer", "transposed")),
        *(case("fp8, special", 5, (2, 2), 16, special=True, interleaved=i, fp8=True) for i in both),
        *(case(f"fp8 {name}", 7, (3, 1), 64, draw=draw, padding=1, fp8=True) for name, draw in FAMILIES.items()),
        case("beyond 2^31", 2, (2, 1), 16, layout="far", seeds=1),
        case("beyond 2^31", 5, (2, 2), 16, pages=3, cache="far", seeds=1),
        case("beyond 2^31, fp8", 5, (2, 2), 16, pages=3, cache="far", fp8=True, seeds=1),
    ]
