"""Cases of sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rapid_llm.verify.cases.build import Case, Device, check_budget, integers, lay, normal, torch_dtype
from rapid_llm.verify.cases.families import FAMILIES

LAST = 1.0 - 2.0**-24
"""The largest fp32 below 1: where a cumulative sum that falls short would run off the end."""

_CHOICES: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 0.3, 0.7, 1.0, 1.0, 1.5, 10.0),
    "top_k": (-1, 0, 1, 2, 5, 40, 1 << 20),
    "top_p": (1.0, 1.0, 0.95, 0.5, 0.1, 0.0, 2.0),
    "min_p": (0.0, 0.0, 0.0, 0.05, 0.5, 1.0),
}
_DTYPES = {"top_k": torch.int32}


def _parameters(g: torch.Generator, rows: int, fixed: dict[str, float]) -> dict[str, Tensor]:
    """One value per row: the fixed one, or any of the choices; `uniform` is random but for both ends."""
    result = {}
    for name, choices in _CHOICES.items():
        pool = torch.tensor((fixed[name],) if name in fixed else choices, dtype=torch.float64)
        picked = pool[torch.randint(0, len(pool), (rows,), generator=g)]
        result[name] = picked.to(_DTYPES.get(name, torch.float32))
    uniform = torch.rand(rows, generator=g)
    if rows > 2:
        uniform[0], uniform[1] = 0.0, LAST
    result["uniform"] = torch.full((rows,), fixed["uniform"]) if "uniform" in fixed else uniform
    return result


PLAIN = {"top_k": -1, "top_p": 1.0, "min_p": 0.0}


def sample(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Greedy with ties, every filter alone and together, the ends of `uniform`, ties at the borders, unusable rows."""
    del scheme
    kind = torch_dtype(dtype)

    def case(
        name: str,
        rows: int,
        vocab: int,
        fixed: dict[str, float] | None = None,
        *,
        layout: str = "contiguous",
        params: str = "contiguous",
        spread: float = 3.0,
        draw: Callable[[torch.Generator], Tensor] | None = None,
        **more: Any,
    ) -> Case:
        def make(g: torch.Generator) -> dict[str, Any]:
            logits = draw(g).to(kind) if draw else normal(g, (rows, vocab), kind, spread)
            args: dict[str, Any] = {"logits": lay(logits, layout, device)}
            for key, value in _parameters(g, rows, fixed or {}).items():
                args[key] = lay(value, params, device)
            return args

        return Case(f"{name}/{rows}x{vocab}/{layout}", make, **more)

    def ties(rows: int, vocab: int) -> Callable[[torch.Generator], Tensor]:
        return lambda g: integers(g, (rows, vocab), -3, 3, torch.float32)

    def masked(rows: int, vocab: int) -> Callable[[torch.Generator], Tensor]:
        def draw(g: torch.Generator) -> Tensor:
            logits = torch.randn(rows, vocab, generator=g) * 2
            logits[torch.rand(rows, vocab, generator=g) < 0.7] = float("-inf")
            logits[:, vocab // 2] = 1.0
            return logits

        return draw

    def unusable(vocab: int) -> Callable[[torch.Generator], Tensor]:
        def draw(g: torch.Generator) -> Tensor:
            logits = torch.randn(6, vocab, generator=g)
            logits[0, vocab - 1] = float("nan")
            logits[1, 0] = float("inf")
            logits[2] = float("-inf")
            logits[4] = float("nan")
            logits[5, 1:] = float("-inf")
            return logits

        return draw

    sweep = {"temperature": 1.0, **PLAIN}
    if not check_budget(budget):
        return [
            case("empty", 0, 8),
            case("greedy", 3, 33, {"temperature": 0.0}, draw=ties(3, 33)),
            case("all", 12, 65, layout="stepped", outs=("strided",)),
            case("ties", 8, 20, draw=ties(8, 20), params="stepped"),
            case("temperature", 12, 20, {"temperature": 0.3, **PLAIN}),
            case("filtered", 12, 20, {"temperature": 1.5, "top_k": 6, "top_p": 0.7, "min_p": 0.0}),
            case("unusable", 6, 40, draw=unusable(40)),
        ]
    filters = [
        ("top_k", 5),
        ("top_k", 1),
        ("top_p", 0.9),
        ("top_p", 0.3),
        ("top_p", 0.0),
        ("min_p", 0.1),
        ("min_p", 1.0),
    ]
    return [
        case("empty", 0, 8),
        case("greedy", 9, 257, {"temperature": 0.0}),
        case("greedy ties", 9, 257, {"temperature": 0.0}, draw=ties(9, 257)),
        *(case("all", 40, v, outs=("strided",)) for v in (1, 2, 31, 257, 1000)),
        case("large", 12, 32000, spread=2.0, seeds=1),
        case("sweep", 128, 12, sweep, draw=lambda g: torch.randn(1, 12, generator=g).expand(128, 12)),
        *(case(f"{n} {v:g}", 30, 130, {"temperature": 1.0, **PLAIN, n: v}) for n, v in filters),
        *(case(f"ties {n} {v:g}", 20, 50, {"temperature": 1.0, **PLAIN, n: v}, draw=ties(20, 50)) for n, v in filters),
        case("ties", 40, 64, draw=ties(40, 64)),
        case("equal", 20, 100, draw=lambda g: torch.ones(20, 100)),
        *(case(f"uniform {u:g}", 20, 300, {"uniform": u}) for u in (0.0, LAST)),
        case("masked", 20, 100, draw=masked(20, 100)),
        case("unusable", 6, 40, draw=unusable(40)),
        case("unusable greedy", 6, 40, {"temperature": 0.0}, draw=unusable(40)),
        case("peaked", 20, 100, spread=60.0),
        case("flat", 20, 100, spread=1e-3),
        case("logits beyond 1e5", 20, 100, spread=2e4 if kind == torch.float16 else 1e5),
        *(case(name, 12, 80, draw=lambda g, draw=draw: draw(g, (12, 80), kind)) for name, draw in FAMILIES.items()),
        *(case("layout", 8, 65, layout=n) for n in ("sliced", "stepped", "transposed", "offset", "expanded")),
        case("parameters", 8, 65, params="stepped"),
        case("parameters", 8, 65, params="expanded"),
        case("beyond 2^31", 2, 65, layout="far", seeds=1),
    ]
