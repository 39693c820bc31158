"""Cases of linear with its neighbours: linear_add, rmsnorm_linear, rmsnorm_linear_silu_and_mul."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rapid_llm.verify.cases.build import Case, Device, check_budget, integers, lay, normal, torch_dtype, wide
from rapid_llm.verify.cases.families import FAMILIES
from rapid_llm.verify.ulp import format_of

Args = dict[str, Tensor]
Draw = Callable[[torch.Generator, tuple[int, ...], tuple[int, ...]], Args]
"""generator, shape of the input, shape of the weight -> the tensors that are not to be drawn as usual."""

_LAYOUTS = (
    *(("offset", "offset"), ("sliced", "sliced"), ("stepped", "contiguous"), ("expanded", "contiguous")),
    *(("transposed", "contiguous"), ("contiguous", "transposed"), ("transposed", "stepped")),
)
"""Of input and weight."""

_SIZES = (
    *((1, 64, 48), (1, 576, 72), (1, 520, 40), (1, 2056, 7), (1, 8, 1), (1, 1, 1)),
    *((2, 96, 33), (3, 7, 5), (9, 64, 40), (17, 160, 65), (33, 64, 31)),
)
"""Rows, features, outputs; one row alone is what kernels for decoding take."""


class _Cases:
    """Builds the cases of one op and dtype. `outputs`: rows of the weight for each result."""

    def __init__(self, dtype: str, device: Device, names: tuple[str, ...], outputs: int = 1) -> None:
        self.kind = torch_dtype(dtype)
        self.device = device
        self.names = names
        self.outputs = outputs

    def case(
        self,
        name: str,
        lead: int | tuple[int, ...],
        k: int,
        n: int,
        *,
        layouts: tuple[str, str] = ("contiguous", "contiguous"),
        third: str = "contiguous",
        bias: str | None = None,
        draw: Draw | None = None,
        spread: float = 1.0,
        eps: float | None = 1e-5,
        scale: torch.dtype | None = None,
        **more: Any,
    ) -> Case:
        """third: the layout of residual or norm_weight. scale: the dtype of norm_weight."""
        rows = lead if isinstance(lead, tuple) else (lead,)

        def make(g: torch.Generator) -> dict[str, Any]:
            drawn = {} if draw is None else draw(g, (*rows, k), (n * self.outputs, k))
            args: dict[str, Any] = {
                "input": drawn.get("input", normal(g, (*rows, k), self.kind, spread)),
                "weight": drawn.get("weight", normal(g, (n * self.outputs, k), self.kind, 0.5)),
            }
            args = {key: lay(value, how, self.device) for (key, value), how in zip(args.items(), layouts, strict=True)}
            if "residual" in self.names:
                residual = drawn.get("residual", normal(g, (*rows, n), self.kind, 3.0))
                return {**args, "residual": lay(residual, third, self.device)}
            weight = drawn.get("norm_weight", normal(g, (k,), scale or self.kind))
            args["norm_weight"] = lay(weight, third, self.device)
            if bias is not None:
                args["bias"] = lay(drawn.get("bias", normal(g, (n,), self.kind, 3.0)), bias, self.device)
            return args if eps is None else {**args, "eps": eps}

        size = f"{'x'.join(map(str, rows))}/{k}->{n}"
        return Case(f"{name}/{size}/{'+'.join((*layouts, third))}{'/bias' if bias else ''}", make, **more)

    def family(self, name: str, rows: int) -> Case:
        """Activations of a family times ordinary weights, and a residual of it. Fewer than 64 outputs: where one value
        outweighs all others, its rounding moves every output alike, which is no bias of the row."""

        def draw(g: torch.Generator, x: tuple[int, ...], w: tuple[int, ...]) -> Args:
            made = {"input": FAMILIES[name](g, x, self.kind)}
            if "residual" in self.names:
                made["residual"] = FAMILIES[name](g, (*x[:-1], w[0]), self.kind)
            return made

        return self.case(name, rows, 160, 48, draw=draw, seeds=1)

    def exact(self, g: torch.Generator, x: tuple[int, ...], w: tuple[int, ...]) -> Args:
        """Sums that fp32 makes without any error, or nearly: integers, and rows of one magnitude, which a norm takes
        to 1 and -1. What is left is the rounding of the result, to which the bound is then tight."""
        weight = integers(g, w, -8, 8, self.kind)
        if "residual" in self.names:
            residual = integers(g, (*x[:-1], w[0]), -50, 50, self.kind)
            return {"input": integers(g, x, -12, 12, self.kind), "weight": weight, "residual": residual}
        signs = torch.where(torch.rand(x, generator=g) < 0.5, 64.0, -64.0)
        norm_weight = integers(g, x[-1:], 1, 3, self.kind)
        return {"input": signs.to(self.kind), "weight": weight / 8, "norm_weight": norm_weight}

    def long_products(self, g: torch.Generator, x: tuple[int, ...], w: tuple[int, ...]) -> Args:
        """As `exact`, for a single term to each row of input, the last column first: products of as many bits as both
        operands together have."""
        low = 1 << (format_of(self.kind).precision - 1 if self.kind != torch.float32 else 11)
        rows = torch.zeros(x).view(-1, x[-1])
        for row in range(len(rows)):
            rows[row, (x[-1] - 1 - row * 37) % x[-1]] = 64.0
        weight = (torch.randint(low, 2 * low, w, generator=g) | 1).to(self.kind) / low
        made = {"input": rows.view(x).to(self.kind), "weight": weight}
        odd = (torch.randint(low, 2 * low, x[-1:], generator=g) | 1).to(self.kind) / low
        if "residual" in self.names:
            made["input"] = made["input"] * odd / 64
            made["residual"] = normal(g, (*x[:-1], w[0]), self.kind, 2.0**-6)
        else:
            made["norm_weight"] = odd
        return made

    def cancelling(self, g: torch.Generator, x: tuple[int, ...], w: tuple[int, ...]) -> Args:
        """Large terms that cancel each other, but for a last one; a residual that cancels nearly all of a product which
        needs more bits than the sum does."""
        weight = torch.full(w, 128.0)
        weight[:, 0] += 1
        if "residual" not in self.names:
            rows = torch.full(x, 64.0)
            rows[..., x[-1] // 2 :] = -64.0
            return {
                "input": rows.to(self.kind),
                "weight": weight.to(self.kind),
                "norm_weight": torch.ones(x[-1:]).to(self.kind),
            }
        weight[:, 1] += 63
        half = integers(g, (*x[:-1], x[-1] // 2), 100, 255, torch.float32)
        rows = torch.cat((half, -half), dim=-1)
        made = {"input": rows.to(self.kind), "weight": weight.to(self.kind)}
        product = made["input"].double() @ made["weight"].double().T
        return {**made, "residual": (0.5 - product).to(self.kind)}

    def special(self, g: torch.Generator, x: tuple[int, ...], w: tuple[int, ...]) -> Args:
        """NaN in the second row of the input, or the only one, infinity in the first of several, and a NaN weight."""
        rows = normal(g, x, self.kind)
        flat = rows.view(-1, x[-1])
        flat[min(1, len(flat) - 1), x[-1] - 1] = float("nan")
        weight = normal(g, w, self.kind).abs() + 0.25
        if len(flat) > 1:
            flat[0, 2] = float("inf")
        weight[w[0] - 1, 0] = float("nan")
        made = {"input": rows, "weight": weight}
        if "residual" in self.names:
            made["residual"] = normal(g, (*x[:-1], w[0]), self.kind)
            made["residual"][..., 0] = float("inf")
        return made

    def nan_weight(self, g: torch.Generator, x: tuple[int, ...], w: tuple[int, ...]) -> Args:
        """One weight that is NaN, and one that is infinite: every other output stays a number."""
        weight = normal(g, w, self.kind)
        weight[0, x[-1] - 1], weight[w[0] - 1, 0] = float("inf"), float("nan")
        return {"input": normal(g, x, self.kind).abs() + 0.25, "weight": weight}

    def extremes(self, g: torch.Generator, x: tuple[int, ...], w: tuple[int, ...]) -> Args:
        """Numbers whose exponents differ widely."""
        return {"input": wide(g, x, self.kind, -12, 4), "weight": wide(g, w, self.kind, -12, 3)}

    def both(self, outs: tuple[str, ...]) -> list[Case]:
        """The full set of what the three ops share; outs: further ways to pass `out`."""
        case, ways = self.case, {"outs": outs} if outs else {}
        return [
            *(case(f"empty{i}", lead, 64, 32) for i, lead in enumerate(((0,), (2, 0)))),
            *(case("plain", *size, seeds=1) for size in _SIZES),
            *(case("strided", m, 96, 40, third="stepped", **ways) for m in (1, 4)),
            case("vector", (), 64, 33),
            case("cube", (2, 3), 64, 33, third="offset"),
            case("cube", (2, 3), 64, 33, layouts=("outer", "contiguous")),
            case("cube of one", (1, 1), 128, 64),
            *(case("exact", m, k, 40, draw=self.exact) for m, k in ((1, 576), (1, 64), (9, 128))),
            *(case("long products", m, 64, 40, draw=self.long_products) for m in (1, 5)),
            *(case("cancelling", m, 64, 9, draw=self.cancelling) for m in (1, 40)),
            *(case("layout", 5, 96, 33, layouts=pair, seeds=1) for pair in _LAYOUTS),
            *(case("single row", 1, 96, 40, layouts=pair, seeds=1) for pair in _LAYOUTS[:5]),
            *(case("extremes", m, 96, 21, draw=self.extremes) for m in (1, 3)),
            *(case("special", m, 64, 24, draw=self.special) for m in (1, 3)),
            *(case("NaN weight", m, 64, 24, draw=self.nan_weight) for m in (1, 3)),
            *(self.family(name, m) for name in FAMILIES for m in (1, 5)),
            case("beyond 2^31", 2, 64, 20, layouts=("far", "contiguous"), seeds=1),
            case("beyond 2^31", 1, 64, 3, layouts=("contiguous", "far"), seeds=1),
        ]


def linear_add(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Every M bucket, widths with tails, exact and cancelling sums, strided operands and residuals, special numbers."""
    del scheme
    make = _Cases(dtype, device, ("input", "weight", "residual"))
    case = make.case
    if not check_budget(budget):
        return [
            case("empty", 0, 64, 33),
            case("plain", 3, 96, 20, layouts=("stepped", "sliced"), third="stepped"),
            case("plain", 1, 136, 33),
            case("exact", (2, 2), 64, 17, draw=make.exact, third="sliced"),
            case("long products", 5, 64, 9, draw=make.long_products),
            case("cancelling", 2, 64, 9, draw=make.cancelling),
            case("special", 2, 32, 8, draw=make.special),
        ]
    layouts = ("sliced", "transposed", "stepped", "offset")
    return [
        *make.both(()),
        *(case("residual", m, 64, 40, third=how) for how in layouts for m in (1, 5)),
        case("residual", (3, 2), 64, 33, third="outer"),
        case("residual", (3, 2), 64, 32, layouts=("parted", "contiguous"), third="parted"),
        case("large", 3, 64, 20, spread=3e3),
        case("beyond 2^31", 2, 64, 3, third="far", seeds=1),
    ]


def rmsnorm_linear(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """As linear_add, with a bias or none, sizes at which eps decides, and norm weights in fp32."""
    del scheme
    make = _Cases(dtype, device, ("input", "norm_weight", "weight", "bias"))
    case = make.case
    if not check_budget(budget):
        return [*_few(make), case("bias", 3, 72, 17, bias="stepped", draw=make.exact)]
    return [
        *_normed(make),
        *(case("bias", m, 96, 40, bias="contiguous", outs=("strided",)) for m in (1, 4, 40)),
        *(case("bias", m, 64, 40, bias="stepped", draw=make.exact) for m in (1, 3)),
    ]


def rmsnorm_linear_silu_and_mul(
    dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full"
) -> list[Case]:
    """As rmsnorm_linear without a bias; gates from saturated to tiny."""
    del scheme
    make = _Cases(dtype, device, ("input", "norm_weight", "weight"), outputs=2)

    def saturated(g: torch.Generator, x: tuple[int, ...], w: tuple[int, ...]) -> Args:
        """Gates from -110 to 110, ups that are small integers, all of them nearly exact."""
        weight = torch.zeros(w)
        weight[: w[0] // 2, 0] = torch.linspace(-110, 110, w[0] // 2).round()
        weight[w[0] // 2 :, 1] = integers(g, (w[0] // 2,), -3, 3, torch.float32)
        rows = torch.where(torch.rand(x, generator=g) < 0.5, 8.0, -8.0)
        return {
            "input": rows.to(make.kind),
            "weight": weight.to(make.kind),
            "norm_weight": torch.ones(x[-1:], dtype=make.kind),
        }

    if not check_budget(budget):
        return [*_few(make), make.case("saturated", 1, 8, 45, draw=saturated)]
    return [*_normed(make), *(make.case("saturated", m, 8, 221, draw=saturated) for m in (1, 4))]


def _few(make: _Cases) -> list[Case]:
    """The small set of the ops that begin with a norm."""
    case = make.case
    return [
        case("empty", 0, 64, 33),
        case("plain", 3, 65, 20, layouts=("stepped", "sliced"), third="stepped", outs=("strided",)),
        case("plain", 1, 136, 33, scale=torch.float32),
        case("small", (2, 2), 64, 17, spread=1e-3, eps=None, third="offset"),
        case("small", 3, 64, 9, spread=1e-3),
        case("exact", 2, 72, 17, draw=make.exact, eps=0.0),
        case("eps", 3, 40, 9, draw=make.exact, eps=2048.0),
        case("long products", 5, 64, 9, draw=make.long_products),
        case("cancelling", 2, 64, 9, draw=make.cancelling),
        case("special", 2, 32, 8, draw=make.special),
    ]


def _normed(make: _Cases) -> list[Case]:
    """The full set of the ops that begin with a norm."""
    case = make.case
    largest = 1e15 if format_of(make.kind).emax > 15 else 1e4
    return [
        *make.both(("strided",)),
        *(case("aliased", m, 64, 64 // make.outputs, outs=("try is:input", "try overlap:input")) for m in (6,)),
        *(case("norm weight", m, 96, 40, scale=torch.float32) for m in (1, 5)),
        *(case("norm weight", m, 104, 40, third="offset", scale=torch.float32) for m in (1, 5)),
        *(case("eps", m, 40, 9, draw=make.exact, eps=e) for m in (1, 4) for e in (0.0, 2048.0, 0.5)),
        *(case("small", m, 96, 33, spread=1e-3, eps=e) for m in (1, 4) for e in (1e-6, None, 1e-3)),
        *(case("large", m, 64, 20, spread=largest) for m in (1, 3)),
        case("parted", (2, 3), 96, 64, layouts=("parted", "sliced"), outs=("parted",)),
        case("long", 2, 4097, 6),
        case("long", 1, 8192, 5),
    ]
