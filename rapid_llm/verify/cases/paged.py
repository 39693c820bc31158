"""Cases of the ops over the paged cache: kvcache.write, attention.prefill, attention.decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rapid_llm.verify.cases.build import Case, Device, check_budget, integers, lay, lay_heads, normal, torch_dtype
from rapid_llm.verify.cases.families import EXTREME, FAMILIES, Family, e4m3_ties
from rapid_llm.verify.ulp import E4M3, e4m3_numbers

PAGE = 16
SPARE = 3
"""Pages beyond those that the sequences need; page 0 among them. They hold NaN."""


def lay_cache(shape: Sequence[int], kind: torch.dtype, layout: str, device: Device, fill: Tensor) -> Tensor:
    """A cache holding `fill` as `kind`: `contiguous`, `paired` (keys and values share pages) or `far` (pages 2**31
    elements apart)."""
    fill = fill.to(kind)
    if layout == "paired":
        both = torch.full((shape[0], 2, *shape[1:]), float("nan"), dtype=kind, device=device)
        return both[:, 0].copy_(fill)
    return lay(fill, layout, device)


def kvcache_write(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Shuffled slots, padding among them, slots at page borders, strided keys and caches, every kind of number; caches
    of e4m3."""
    del scheme
    kind = torch_dtype(dtype)

    def case(
        name: str,
        tokens: int,
        heads: int,
        dim: int,
        *,
        pages: int = 6,
        page: int = PAGE,
        padding: int = 0,
        layout: str = "contiguous",
        cache: str = "contiguous",
        slots: str = "contiguous",
        draw: Family | None = None,
        fp8: bool = False,
        **more: Any,
    ) -> Case:
        pages, stored = max(pages, -(-tokens // page) + 1), E4M3 if fp8 else kind

        def make(g: torch.Generator) -> dict[str, Any]:
            chosen = torch.randperm(pages * page, generator=g)
            if tokens > 2:  # slots on both sides of a page border, and the last one of all
                borders = torch.tensor([page - 1, page, pages * page - 1])
                chosen = torch.cat((borders, chosen[~torch.isin(chosen, borders)]))
            chosen = chosen[:tokens][torch.randperm(tokens, generator=g)]
            chosen[torch.randperm(tokens, generator=g)[:padding]] = -1
            if padding > 1:
                chosen[int(torch.nonzero(chosen < 0)[0])] = -(2**40)
            shape = (pages, page, heads, dim)
            key, value = ((draw or normal)(g, (tokens, heads, dim), kind) for _ in range(2))
            if tokens > 1:
                key[1, 0, 0], value[0, 0, -1] = float("nan"), float("-inf")
            return {
                "key": lay_heads(key, layout, device),
                "value": lay_heads(value, layout, device),
                "k_cache": lay_cache(shape, stored, cache, device, normal(g, shape, kind)),
                "v_cache": lay_cache(shape, stored, cache, device, normal(g, shape, kind)),
                "slot_mapping": lay(chosen, slots, device),
            }

        return Case(f"{name}/{tokens}x{heads}x{dim}/page {page}/{layout}/{cache}", make, **more)

    if not check_budget(budget):
        return [
            case("empty", 0, 2, 8),
            case("plain", 5, 3, 16, layout="fused"),
            case("padding", 4, 2, 24, padding=2, cache="paired", slots="stepped"),
            case("page", 3, 1, 7, page=1, layout="stepped"),
            case("fp8", 5, 3, 16, layout="fused", padding=1, draw=e4m3_ties, fp8=True),
        ]
    return [
        case("empty", 0, 2, 8),
        *(case("plain", t, h, d) for t, h, d in ((1, 3, 64), (17, 3, 64), (64, 8, 128), (5, 1, 1), (9, 2, 33))),
        *(case("page", 9, 2, 32, page=p) for p in (1, 8, 32, 256)),
        case("padding", 12, 3, 64, padding=5),
        case("all padding", 4, 2, 16, padding=4),
        *(case("layout", 9, 3, 32, layout=n) for n in ("fused", "sliced", "stepped", "outer", "offset", "transposed")),
        *(case("layout", 9, 3, 32, cache=n) for n in ("paired", "offset", "sliced", "outer", "transposed")),
        case("slots", 7, 3, 32, slots="stepped"),
        *(case(name, 7, 3, 64, draw=draw) for name, draw in {**FAMILIES, **EXTREME}.items()),
        case("fp8", 33, 3, 64, padding=3, draw=e4m3_ties, fp8=True),
        *(
            case("fp8", 9, 2, 33, page=8, cache=n, fp8=True)
            for n in ("paired", "offset", "sliced", "outer", "transposed")
        ),
        *(case("fp8", 9, 3, 32, layout=n, draw=e4m3_ties, fp8=True) for n in ("fused", "stepped", "transposed")),
        *(case(f"fp8 {name}", 7, 3, 64, draw=draw, fp8=True) for name, draw in {**FAMILIES, **EXTREME}.items()),
        case("beyond 2^31", 5, 2, 16, pages=3, cache="far", seeds=1),
        case("beyond 2^31", 2, 2, 16, layout="far", seeds=1),
        case("beyond 2^31, fp8", 5, 2, 16, pages=3, cache="far", fp8=True, seeds=1),
    ]


class _Attention:
    """Builds caches, block tables and queries for sequences given as (query tokens, keys)."""

    def __init__(self, dtype: str, device: Device, *, decode: bool) -> None:
        self.kind = torch_dtype(dtype)
        self.device = device
        self.decode = decode

    def case(
        self,
        name: str,
        sequences: Sequence[tuple[int, int]],
        heads: tuple[int, int] = (6, 2),
        dim: int = 32,
        *,
        page: int = PAGE,
        layout: str = "contiguous",
        cache: str = "contiguous",
        table: str = "contiguous",
        spread: float = 1.0,
        scale: float | None = None,
        exact: bool = False,
        special: str = "",
        shared: bool = False,
        equal: bool = False,
        draw: Family | None = None,
        window: int = 0,
        softcap: float = 0.0,
        fp8: str = "",
        **more: Any,
    ) -> Case:
        """fp8: the caches are of e4m3 and hold `normal` numbers, or any `codes`."""

        def make(g: torch.Generator) -> dict[str, Any]:
            args = self._paged(
                g, sequences, heads[1], dim, page, cache, table, spread, exact, shared, draw, window, fp8
            )
            shape = (sum(q for q, _ in sequences), heads[0], dim)
            query = integers(g, shape, -15, 15, self.kind) if exact else normal(g, shape, self.kind, spread)
            if draw is not None:
                query = draw(g, shape, self.kind)
            if equal:  # all scores are 0, all weights are exact, and the low bits of a mean are the store's alone
                query.zero_()
            if special:
                self._spoil(special, query, args, sequences)
            args["query"] = lay_heads(query, layout, self.device)
            args["scale"] = dim**-0.5 if scale is None else scale
            args |= {"window": window, "softcap": softcap} if window or softcap else {}
            if not self.decode:
                starts = torch.tensor([0, *(q for q, _ in sequences)]).cumsum(0).to(torch.int32)
                args["cu_seqlens_q"] = lay(starts, table if table == "stepped" else "contiguous", self.device)
            return args

        lengths = ",".join(f"{n}" if self.decode else f"{q}/{n}" for q, n in sequences)
        lengths = lengths if len(lengths) < 40 else f"{len(sequences)} sequences"
        name += f", window {window}" * bool(window) + f", softcap {softcap:g}" * bool(softcap)
        return Case(f"{name}/{lengths}/{heads[0]}:{heads[1]}x{dim}/page {page}/{layout}/{cache}", make, **more)

    def _paged(
        self,
        g: torch.Generator,
        sequences: Sequence[tuple[int, int]],
        heads: int,
        dim: int,
        page: int,
        layout: str,
        table_layout: str,
        spread: float,
        exact: bool,
        shared: bool,
        draw: Family | None,
        window: int,
        fp8: str,
    ) -> dict[str, Any]:
        """Caches in which every row that no query sees is NaN, and block tables over shuffled pages."""
        lengths = [n for _, n in sequences]
        needed = [-(-n // page) for n in lengths]
        total = sum(needed) + SPARE
        free = [int(p) + 1 for p in torch.randperm(total - 1, generator=g)]
        poisoned = free.pop()
        table = torch.full((len(sequences), max([*needed, 1]) + 1), poisoned, dtype=torch.int32)
        caches = [torch.full((total, page, heads, dim), float("nan"), dtype=self.kind) for _ in range(2)]
        for i, length in enumerate(lengths):
            pages = [free.pop() for _ in range(needed[i])]
            if shared and i > 0 and needed[i] > 1 and needed[i - 1] > 1:
                pages[0] = int(table[i - 1, 0])  # a common prefix of one page
            table[i, : needed[i]] = torch.tensor(pages, dtype=torch.int32)
            slots = torch.arange(length)
            where = (torch.tensor(pages, dtype=torch.int64)[slots // page], slots % page)
            for cache, size in zip(caches, (spread, 1.0), strict=True):
                shape = (length, heads, dim)
                values = integers(g, shape, -15, 15, self.kind) if exact else normal(g, shape, self.kind, size)
                if draw is not None and length:
                    values = draw(g, shape, self.kind)
                if fp8 == "codes":
                    numbers = e4m3_numbers()
                    values = numbers[torch.randint(0, len(numbers), shape, generator=g)].to(self.kind)
                if window and not shared:  # what lies before the window of the first query is no query's
                    values[: max(length - max(sequences[i][0], 1) + 1 - window, 0)] = float("nan")
                cache[where] = values
        shape, stored = caches[0].shape, E4M3 if fp8 else self.kind
        return {
            "k_cache": lay_cache(shape, stored, layout, self.device, caches[0]),
            "v_cache": lay_cache(shape, stored, layout, self.device, caches[1]),
            "seq_lens": lay(torch.tensor(lengths, dtype=torch.int32), self._index(table_layout), self.device),
            "block_table": lay(table, table_layout, self.device),
        }

    @staticmethod
    def _index(layout: str) -> str:
        return "stepped" if layout == "stepped" else "contiguous"

    def _spoil(self, what: str, query: Tensor, args: dict[str, Any], sequences: Sequence[tuple[int, int]]) -> None:
        """Put a NaN or an infinity where the op says whom it reaches."""
        first = int(args["block_table"][0, 0])
        if what == "query":
            query[0, 1, 3] = float("nan")
        elif what == "key":
            args["k_cache"][first, 0, 0, 1] = float("nan")
        elif what == "value":
            args["v_cache"][first, 0, 1, 2] = float("nan")
            if (
                args["v_cache"].dtype == torch.float32
            ):  # a 16-bit row may split its fp32 weights into parts, and 0 * inf is NaN
                args["v_cache"][first, 0, 0, 5] = float("inf")
        else:
            raise ValueError(f"unknown special {what!r}")


_GEOMETRIES = (
    ((9, 3), 64, PAGE),
    ((1, 1), 8, 1),
    ((8, 1), 40, 8),
    ((4, 4), 80, 32),
    ((8, 2), 128, PAGE),
    ((16, 2), 256, 128),
)
"""(query and key/value heads, head_dim, page size): every value once or more; each triple is a GPU compilation."""

_BORDERS = (PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1)


def attention_decode(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Lengths at page borders and 0, GQA ratios, head sizes, strided caches, sharp and flat weights, poisoned
    neighbours."""
    del scheme
    make = _Attention(dtype, device, decode=True)

    def case(name: str, lengths: Sequence[int], *args: Any, **more: Any) -> Case:
        return make.case(name, [(1, n) for n in lengths], *args, **more)

    strided, aliased = ("strided",), ("try is:query", "try overlap:query")
    if not check_budget(budget):
        return [
            case("empty", ()),
            case("borders", (15, 0, 17), (2, 1), 16, layout="fused", outs=strided),
            case("plain", (33,), (3, 3), 24, cache="paired", table="stepped"),
            case("sharp", (20,), (4, 2), 16, spread=6.0),
            case("special", (18,), (4, 2), 16, special="value"),
            case("limits", (40, 3, 0), (4, 2), 16, window=11),
            case("limits", (20, 5), (2, 1), 16, scale=0.37, softcap=1.5, spread=2.0),
            case("limits", (37, 8), (2, 2), 24, window=8, softcap=4.0),
            case("fp8", (40, 3, 0), (4, 2), 16, fp8="normal", layout="fused"),
            case("fp8 codes", (20,), (2, 1), 24, fp8="codes", scale=2.0**-8, cache="paired"),
        ]
    return [
        case("empty", ()),
        case("borders", (1, 2, *_BORDERS), outs=strided),
        case("padding", (0, 5, 0, 40), outs=aliased),
        case("all padding", (0, 0)),
        *(case("geometry", (37, 16, 1), h, d, page=p) for h, d, p in _GEOMETRIES),
        case("long", (700, 3, 333), seeds=1),
        case("very long", (2500,), seeds=1),
        case("many", [(i * 7) % 50 for i in range(40)], seeds=1),
        case("shared", (40, 50, 33), shared=True),
        *(case("layout", (20, 35), layout=n) for n in ("fused", "sliced", "stepped", "outer", "offset")),
        *(case("layout", (20, 35), cache=n) for n in ("paired", "offset", "sliced", "outer", "transposed")),
        *(case("table", (20, 35), table=n) for n in ("sliced", "stepped", "transposed")),
        case("sharp", (60, 17), spread=8.0),
        case("flat", (60, 17), spread=1e-3),
        case("exact scores", (60, 17), exact=True, scale=0.25),
        case("scale", (60, 17), scale=0.37),
        *(case(f"special {s}", (20, 33), special=s) for s in ("query", "key", "value")),
        *(case("model", (20, 35), (4, 2), 64, layout=n, outs=strided) for n in ("fused", "sliced", "outer")),
        *(case("model", (20, 35), (4, 2), 64, cache=n) for n in ("paired", "outer", "transposed")),
        *(case(f"model, special {s}", (20, 33), (4, 2), 64, special=s) for s in ("query", "key", "value")),
        *(case("equal", (16, 8, 4, 1, 2), (4, 2), d, equal=True) for d in (32, 64)),
        *(case(name, (40, 17), (4, 2), 64, draw=draw) for name, draw in FAMILIES.items()),
        case("logits beyond 1e5", (40, 17), (4, 2), 64, spread=110.0),
        *(case("limits", (40, 17, 5, 0, 1), window=w) for w in (1, 5, 16, 17, 39, 40, 41)),
        case("limits", (300, 90), (8, 2), 64, window=70, layout="fused"),
        case("limits", (700, 3, 333), window=200, seeds=1),
        *(case("limits", (40, 17, 1), softcap=c) for c in (0.5, 30.0)),
        case("limits", (40, 17), (4, 2), 64, softcap=50.0, spread=110.0),
        case("limits", (60, 17), softcap=2.0, spread=1e-3),
        case("limits", (16, 8, 4, 1, 2), (4, 2), equal=True, softcap=3.0),
        *(case("limits", (40, 17), (8, 1), 40, page=8, window=9, softcap=4.0, scale=s) for s in (0.37, -0.2)),
        *(
            case("limits", (40, 17), window=12, cache=n, table=t)
            for n, t in (("paired", "sliced"), ("outer", "stepped"))
        ),
        *(case("fp8", (40, 17, 1, 0), h, d, page=p, fp8="normal") for h, d, p in _GEOMETRIES),
        *(case("fp8 codes", (60, 17), (4, 2), 64, scale=s, fp8="codes") for s in (2.0**-8, 0.125)),
        *(case("fp8", (20, 35), fp8="normal", cache=n) for n in ("paired", "offset", "sliced", "outer", "transposed")),
        *(case(f"fp8, special {s}", (20, 33), (4, 2), 64, special=s, fp8="normal") for s in ("query", "key", "value")),
        case("fp8, limits", (300, 90, 5), (8, 2), 64, window=70, softcap=4.0, layout="fused", fp8="normal"),
        case("beyond 2^31", (20, 18), cache="far", seeds=1),
        case("beyond 2^31, fp8", (20, 18), cache="far", fp8="normal", seeds=1),
        case("beyond 2^31", (20, 18), layout="far", seeds=1),
    ]


def attention_prefill(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Whole prompts, chunks resumed on a prefix, single tokens among them, sequences without tokens or without keys."""
    del scheme
    make = _Attention(dtype, device, decode=False)
    case = make.case
    strided, aliased = ("strided",), ("try is:query", "try overlap:query")
    if not check_budget(budget):
        return [
            case("empty", ()),
            case("whole", [(5, 5), (0, 7), (3, 3)], (2, 1), 16, layout="fused", outs=strided),
            case("resumed", [(3, 18), (1, 17)], (3, 3), 24, cache="paired", table="stepped"),
            case("no keys", [(2, 0), (4, 2)], (2, 1), 16),
            case("special", [(2, 18)], (4, 2), 16, special="key"),
            case("limits", [(3, 40), (7, 7), (2, 0)], (4, 2), 16, window=5),
            case("limits", [(2, 20), (5, 5)], (2, 1), 16, scale=0.37, softcap=1.5, spread=2.0),
            case("limits", [(3, 37)], (2, 2), 24, window=8, softcap=4.0),
            case("fp8", [(3, 20), (5, 5), (0, 3)], (4, 2), 16, fp8="normal", layout="fused"),
            case("fp8 codes", [(2, 20)], (2, 1), 24, fp8="codes", scale=2.0**-8, cache="paired"),
        ]
    return [
        case("empty", ()),
        case("no tokens", [(0, 0), (0, 9)]),
        case("borders", [(n, n) for n in (1, 2, *_BORDERS)], outs=strided, seeds=1),
        case("resumed", [(3, n) for n in _BORDERS]),
        case("resumed at a border", [(16, 32), (1, 17), (17, 33), (15, 31)]),
        case("mixed", [(1, 40), (7, 7), (0, 12), (20, 50), (1, 1)], outs=aliased),
        case("no keys", [(2, 0), (5, 3), (4, 4)]),
        *(case("geometry", [(6, 37), (9, 9)], h, d, page=p) for h, d, p in _GEOMETRIES),
        case("long", [(130, 300), (70, 70)], seeds=1),
        case("many", [(1 + i % 5, 3 + (i * 7) % 40 + i % 5) for i in range(30)], seeds=1),
        case("shared", [(5, 40), (6, 50), (20, 33)], shared=True),
        *(case("layout", [(5, 20), (7, 35)], layout=n) for n in ("fused", "sliced", "stepped", "outer", "offset")),
        *(case("layout", [(5, 20), (7, 35)], cache=n) for n in ("paired", "offset", "sliced", "outer", "transposed")),
        *(case("table", [(5, 20), (7, 35)], table=n) for n in ("sliced", "stepped", "transposed")),
        case("sharp", [(20, 60), (17, 17)], spread=8.0),
        case("flat", [(20, 60), (17, 17)], spread=1e-3),
        case("exact scores", [(20, 60), (17, 17)], exact=True, scale=0.25),
        case("scale", [(20, 60), (17, 17)], scale=0.37),
        *(case(f"special {s}", [(5, 20), (33, 33)], special=s) for s in ("query", "key", "value")),
        *(case("model", [(5, 20), (7, 35)], (4, 2), 64, layout=n, outs=strided) for n in ("fused", "sliced", "outer")),
        *(case("model", [(5, 20), (7, 35)], (4, 2), 64, cache=n) for n in ("paired", "outer", "transposed")),
        *(case(f"model, special {s}", [(5, 20), (33, 33)], (4, 2), 64, special=s) for s in ("query", "key", "value")),
        *(case("equal", [(1, 16), (16, 16), (3, 9), (1, 1)], (4, 2), d, equal=True) for d in (32, 64)),
        *(case(name, [(5, 40), (17, 17)], (4, 2), 64, draw=draw) for name, draw in FAMILIES.items()),
        case("logits beyond 1e5", [(5, 40), (17, 17)], (4, 2), 64, spread=110.0),
        *(case("limits", [(9, 40), (17, 17), (1, 5), (0, 3), (2, 0)], window=w) for w in (1, 5, 16, 17, 39, 40, 41)),
        case("limits", [(5, 300), (90, 90)], (8, 2), 64, window=70, layout="fused"),
        case("limits", [(130, 300), (70, 70)], window=100, seeds=1),
        *(case("limits", [(9, 40), (17, 17)], softcap=c) for c in (0.5, 30.0)),
        case("limits", [(5, 40), (17, 17)], (4, 2), 64, softcap=50.0, spread=110.0),
        case("limits", [(20, 60), (17, 17)], softcap=2.0, spread=1e-3),
        case("limits", [(1, 16), (16, 16), (1, 1)], (4, 2), equal=True, softcap=3.0),
        *(
            case("limits", [(9, 40), (17, 17)], (8, 1), 40, page=8, window=9, softcap=4.0, scale=s)
            for s in (0.37, -0.2)
        ),
        *(
            case("limits", [(9, 40), (17, 17)], window=12, cache=n, table=t)
            for n, t in (("paired", "sliced"), ("outer", "stepped"))
        ),
        *(case("fp8", [(9, 40), (17, 17), (1, 5), (0, 3)], h, d, page=p, fp8="normal") for h, d, p in _GEOMETRIES),
        *(case("fp8 codes", [(20, 60), (17, 17)], (4, 2), 64, scale=s, fp8="codes") for s in (2.0**-8, 0.125)),
        *(
            case("fp8", [(5, 20), (7, 35)], fp8="normal", cache=n)
            for n in ("paired", "offset", "sliced", "outer", "transposed")
        ),
        *(
            case(f"fp8, special {s}", [(5, 20), (33, 33)], (4, 2), 64, special=s, fp8="normal")
            for s in ("query", "key", "value")
        ),
        case("fp8, limits", [(5, 300), (90, 90)], (8, 2), 64, window=70, softcap=4.0, layout="fused", fp8="normal"),
        case("beyond 2^31", [(5, 20), (3, 18)], cache="far", seeds=1),
        case("beyond 2^31, fp8", [(5, 20), (3, 18)], cache="far", fp8="normal", seeds=1),
        case("beyond 2^31", [(1, 20), (1, 18)], layout="far", seeds=1),
    ]
