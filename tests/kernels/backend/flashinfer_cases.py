"""Cases at the sizes that flashinfer takes, where the ops' own are mostly narrower: heads of 64, multiples of 8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rapid_llm.verify.cases.build import Case, Device, edges, lay, lay_heads, normal, torch_dtype
from rapid_llm.verify.cases.paged import _BORDERS, _Attention

_LAYOUTS = ("fused", "sliced", "outer", "offset", "stepped")
_GROUPS = ((2, 2), (4, 2), (3, 1), (8, 2), (5, 1), (8, 1), (16, 1))
_CACHES = ("paired", "sliced", "outer", "offset")


def attention_decode(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Page borders, padding, every kind of group, strided tensors, sequences long enough to be split."""
    del scheme, budget
    make = _Attention(dtype, device, decode=True)

    def case(name: str, lengths: Sequence[int], heads: tuple[int, int], dim: int = 64, **more: Any) -> Case:
        return make.case(name, [(1, n) for n in lengths], heads, dim, **more)

    return [
        case("borders", (1, 2, *_BORDERS), (6, 2), outs=("strided",)),
        case("padding", (0, 5, 0, 40), (6, 2), outs=("try is:query", "try overlap:query")),
        case("all padding", (0, 0), (6, 2)),
        *(
            case("group", (37, 16, 1), heads, 128)
            for heads in ((2, 2), (4, 2), (3, 1), (8, 2), (5, 1), (8, 1), (16, 1))
        ),
        case("page", (37, 64), (4, 2), 256, page=32),
        case("page", (37, 5), (4, 2), page=1),
        case("split", (700, 3, 333), (4, 2), 128, seeds=1),
        case("split", (2500,), (8, 1), 128, seeds=1),
        case("many", [(i * 7) % 50 for i in range(40)], (8, 2), seeds=1),
        case("shared", (40, 50, 33), (6, 2), shared=True),
        *(case("layout", (20, 35), (6, 2), layout=n) for n in _LAYOUTS),
        *(case("layout", (20, 35), (6, 2), cache=n) for n in _CACHES),
        *(case("table", (20, 35), (6, 2), table=n) for n in ("sliced", "stepped", "transposed")),
        case("sharp", (60, 17), (6, 2), spread=4.0),
        case("flat", (60, 17), (8, 2), spread=1e-3),
        *(case("scale", (60, 17), (4, 1), scale=s) for s in (0.37, -0.2, 0.0)),
        *(case(f"special {s}", (20, 33), (6, 2), special=s) for s in ("query", "key", "value")),
    ]


def attention_prefill(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Whole prompts, resumed chunks, single tokens, chunks longer than their sequences, sequences without tokens."""
    del scheme, budget
    make = _Attention(dtype, device, decode=False)

    def case(
        name: str, sequences: Sequence[tuple[int, int]], heads: tuple[int, int] = (6, 2), dim: int = 64, **more: Any
    ) -> Case:
        return make.case(name, sequences, heads, dim, **more)

    return [
        case("no tokens", [(0, 0), (0, 9)]),
        case("borders", [(n, n) for n in (1, 2, *_BORDERS)], outs=("strided",), seeds=1),
        case("resumed", [(3, n) for n in _BORDERS]),
        case("mixed", [(1, 40), (7, 7), (0, 12), (20, 50), (1, 1)], outs=("try is:query", "try overlap:query")),
        case("no keys", [(2, 0), (5, 3), (4, 4), (0, 0), (3, 1)]),
        case("no keys at all", [(2, 0), (3, 0)]),
        *(case("group", [(6, 37), (9, 9)], heads, 128) for heads in _GROUPS),
        case("page", [(6, 37), (9, 9)], (4, 2), 256, page=32),
        case("page", [(6, 37), (9, 9)], (4, 2), page=1),
        case("long", [(130, 300), (70, 70)], (4, 1), 128, seeds=1),
        case("split", [(2, 2500)], (4, 1), 128, seeds=1),
        case("shared", [(5, 40), (6, 50), (20, 33)], shared=True),
        *(case("layout", [(5, 20), (7, 35)], layout=n) for n in _LAYOUTS),
        *(case("layout", [(5, 20), (7, 35)], cache=n) for n in _CACHES),
        *(case("table", [(5, 20), (7, 35)], table=n) for n in ("sliced", "stepped", "transposed")),
        case("sharp", [(20, 60), (17, 17)], spread=4.0),
        case("flat", [(20, 60), (17, 17)], spread=1e-3),
        *(case("scale", [(20, 60), (17, 17)], scale=s) for s in (0.37, -0.2, 0.0)),
        *(case(f"special {s}", [(5, 20), (33, 33)], special=s) for s in ("query", "key", "value")),
    ]


def silu_and_mul(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Widths around the kernel's vectors and blocks, ranks 1 to 4, special numbers, `out` of any layout."""
    del scheme, budget
    kind = torch_dtype(dtype)

    def case(shape: tuple[int, ...], spread: float = 2.0, **more: Any) -> Case:
        def make(g: torch.Generator) -> dict[str, Any]:
            return {"input": normal(g, shape, kind, spread).to(device)}

        return Case(f"{'x'.join(map(str, shape))}/{spread:g}", make, **more)

    def special(g: torch.Generator) -> dict[str, Any]:
        numbers = edges(kind)
        numbers = numbers[numbers.abs() < 1e4]
        numbers = torch.cat((numbers, -numbers, numbers))[:24].view(1, 24)
        return {"input": torch.cat((numbers, normal(g, (1, 24), kind)), 1).to(device)}

    widths = (8, 16, 24, 1000, 1536, 8192, 8200, 14336)
    return [
        *(case((3, 2 * w), outs=("strided",)) for w in widths),
        case((0, 64)),
        case((48,)),
        case((2, 3, 2, 32)),
        case((4, 128), 60.0),
        case((4, 128), 1e-3),
        Case("special", special),
    ]


def rope(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Both pairings, every width that flashinfer rotates, whole and part of a head, heads within a fused projection."""
    del scheme, budget
    kind = torch_dtype(dtype)

    def case(
        tokens: int, dim: int, rotary: int, interleaved: bool, layout: str = "contiguous", index: str = "int64"
    ) -> Case:
        def make(g: torch.Generator) -> dict[str, Any]:
            angles = torch.rand(60, rotary // 2, generator=g, dtype=torch.float64) * 6.28
            positions = torch.randint(0, 60, (tokens,), generator=g).to(getattr(torch, index))
            return {
                "query": lay_heads(normal(g, (tokens, 6, dim), kind), layout, device),
                "key": lay_heads(normal(g, (tokens, 2, dim), kind), layout, device),
                "positions": lay(positions, "stepped" if layout == "fused" else "contiguous", device),
                "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), 1).float().to(device),
                "interleaved": interleaved,
            }

        return Case(f"{tokens}x{dim}/{rotary}/{layout}/{index}/{interleaved}", make)

    return [
        case(case_tokens, dim, rotary, interleaved, layout, index)
        for interleaved in (False, True)
        for case_tokens, dim, rotary, layout, index in (
            (5, 64, 64, "fused", "int64"),
            (1, 128, 128, "fused", "int32"),
            (300, 128, 128, "contiguous", "int64"),
            (9, 256, 256, "outer", "int64"),
            (9, 80, 64, "fused", "int64"),
            (9, 256, 128, "sliced", "int32"),
            (0, 64, 64, "contiguous", "int64"),
        )
    ]


def rmsnorm(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Widths around the kernels' vectors and clusters, heads of a fused projection, weights of other dtypes."""
    del scheme, budget
    kind = torch_dtype(dtype)

    def case(shape: tuple[int, ...], layout: str = "contiguous", weight: torch.dtype = kind, **more: Any) -> Case:
        def make(g: torch.Generator) -> dict[str, Any]:
            values = normal(g, shape, kind)
            laid = lay_heads(values, layout, device) if len(shape) == 3 else lay(values, layout, device)
            return {"input": laid, "weight": normal(g, shape[-1:], weight).to(device), "eps": 1e-5}

        return Case(f"{'x'.join(map(str, shape))}/{layout}/{weight}", make, **more)

    return [
        *(case((3, w), outs=("strided", "try is:input")) for w in (8, 24, 128, 896, 2048, 4096, 5120, 8192, 16384)),
        *(case((3, w), weight=torch.float32) for w in (64, 4096)),
        case((7, 6, 128), "fused"),
        case((7, 6, 64), "outer"),
        case((6, 256), "sliced"),
        case((2, 3, 2, 64)),
        case((1000, 64)),
    ]
