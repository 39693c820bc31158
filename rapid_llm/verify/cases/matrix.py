"""Cases of the ops that read weights: embedding and linear, dense and block-quantised."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import (
    BLOCK_BYTES,
    DECODED,
    FORMATS,
    FP8,
    FP8_CHANNEL,
    GROUP,
    INT4_GROUPS,
    INT8_CHANNEL,
)
from rapid_llm.verify import gguf_formats
from rapid_llm.verify.cases.build import (
    Case,
    Device,
    check_budget,
    every_bit_pattern,
    integers,
    lay,
    normal,
    torch_dtype,
    wide,
)
from rapid_llm.verify.cases.families import FAMILIES
from rapid_llm.verify.formats import random_blocks
from rapid_llm.verify.ulp import format_of

Draw = Callable[[torch.Generator], Tensor]

DENSE = "unquantized"


def _interpreted() -> bool:
    from rapid_llm.kernels.ops.triton_support import INTERPRETED

    return bool(INTERPRETED)


def _whole(k: int, scheme: str) -> int:
    """k, or the next multiple of what the scheme's blocks hold."""
    step = 1 if scheme == DENSE or scheme in BLOCK_BYTES else FORMATS[scheme].weights
    return -(-k // step) * step


def _extreme_blocks(g: torch.Generator, rows: int, elements: int, scheme: str, largest: float = 65504.0) -> Tensor:
    """Blocks whose scale is 0, subnormal, the largest, or negative. `largest`: of q8_0, whose codes reach 128."""
    data = random_blocks(g, rows, elements, scheme)
    if scheme in (FP8, FP8_CHANNEL, INT8_CHANNEL):
        limit = largest if scheme == INT8_CHANNEL else largest / 500
        scales = torch.tensor([0.0, 2.0**-130, limit, -limit, -1.5])[torch.arange(rows) % 5]
        width = elements // GROUP if scheme == FP8 else 1
        each = scales[:, None].expand(rows, width).contiguous()
        data[:, elements : elements + 4 * width] = each.view(torch.uint8)
        return data
    if scheme in INT4_GROUPS:
        start, size = elements // 2, 4
        blocks = data[:, start : start + elements // FORMATS[scheme].weights * size].unflatten(1, (-1, size))
    else:
        blocks = data.view(rows, -1, FORMATS[scheme].block)
    limit = largest * min(128 / gguf_formats.REACH.get(scheme, 128), 1.0)
    at = gguf_formats.HALVES.get(scheme, (0,))[0]
    for row, scale in enumerate((0.0, 2.0**-24, limit, -limit, -1.5)):
        blocks[row % rows, :, at : at + 2] = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
    return data


def embedding(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Ids of any shape and integer type, first and last rows, strided tables, result dtypes, ids outside of the table.

    A dense table has a float dtype, a quantised one `uint8`; for other pairs there are no cases.
    """
    scheme = scheme or DENSE
    if (scheme == DENSE) == (dtype == "uint8"):
        return []
    kind = torch_dtype(dtype)

    def table(g: torch.Generator, vocab: int, hidden: int) -> Tensor:
        return normal(g, (vocab, hidden), kind) if scheme == DENSE else random_blocks(g, vocab, hidden, scheme)

    wide_enough = _whole(64, scheme)

    def case(
        name: str,
        ids: tuple[int, ...],
        vocab: int,
        hidden: int,
        *,
        layout: str = "contiguous",
        id_layout: str = "contiguous",
        index: torch.dtype = torch.int64,
        to: torch.dtype | None = None,
        low: int = 0,
        **more: Any,
    ) -> Case:
        hidden = _whole(hidden, scheme)

        def make(g: torch.Generator) -> dict[str, Any]:
            chosen = torch.randint(low, vocab - low, ids, generator=g).to(index)
            if chosen.numel() > 2:
                flat = chosen.view(-1)
                flat[0], flat[1] = (vocab - 1, 0) if low == 0 else (-1, vocab)
            weight = lay(table(g, vocab, hidden), layout, device)
            args = {"input": lay(chosen, id_layout, device), "weight": weight, "scheme": scheme}
            return args if to is None else {**args, "dtype": to}

        into = "" if to is None else f"/{str(to).removeprefix('torch.')}"
        return Case(f"{name}/{'x'.join(map(str, ids))}/{vocab}x{hidden}/{layout}{into}", make, **more)

    def bit_patterns(g: torch.Generator) -> dict[str, Any]:
        if scheme == DENSE:
            weight = every_bit_pattern(g, 8 * 64, kind).view(8, 64)
        else:
            weight = _extreme_blocks(g, 8, wide_enough, scheme)
        return {"input": torch.arange(8, device=device), "weight": weight.to(device), "scheme": scheme}

    def outside() -> list[Case]:
        """On a GPU ids outside give zeros, on the CPU an IndexError; the interpreter runs GPU code on CPU tensors."""
        if torch.device(device).type == "cuda":
            return [case("outside", (6,), 20, 32, low=-3)]
        return [] if _interpreted() else [case("outside", (6,), 20, 32, low=-3, raises=(IndexError,))]

    others = [d for d in (torch.float32, torch.float16, torch.bfloat16) if d != kind]
    if not check_budget(budget):
        return [
            case("empty", (0,), 5, 32),
            case("plain", (3,), 7, 96, index=torch.int32, outs=("strided",)),
            case("plain", (2, 2), 9, 64, layout="sliced", id_layout="stepped", to=torch.bfloat16),
            Case("bits", bit_patterns),
        ]
    if scheme in DECODED:
        return [
            case("empty", (2, 0), 5, 32),
            case("plain", (7,), 41, 576, outs=("strided",)),
            case("shape", (2, 3, 2), 11, 64, index=torch.int32),
            *(case("layout", (9,), 12, 96, layout=name, id_layout="stepped") for name in ("sliced", "offset")),
            case("cast", (9,), 12, 96, to=torch.bfloat16),
            Case("bits", bit_patterns),
            *outside(),
        ]
    widths = (1, 33, 576, 1000) if scheme == DENSE else (32, 96, 576, 1024)
    layouts = ("sliced", "offset", "transposed", "stepped", "expanded") if scheme == DENSE else ("sliced", "offset")
    return [
        *(case(f"empty{i}", s, 5, 32) for i, s in enumerate(((0,), (2, 0)))),
        *(case("plain", (7,), 41, w, outs=("strided",)) for w in widths),
        case("scalar", (), 11, 64),
        case("one row", (3,), 1, 64),
        case("shape", (2, 3, 2), 11, 64, index=torch.int32),
        case("large", (20,), 3000, 64, seeds=1),
        *(case("layout", (9,), 12, 96, layout=name, id_layout="stepped") for name in layouts),
        *(case("cast", (9,), 12, 96, to=d) for d in others),
        Case("bits", bit_patterns),
        *outside(),
        case("beyond 2^31", (5,), 4, 64, layout="far", seeds=1),
    ]


class _Linear:
    """Builds the cases of one dtype and scheme."""

    def __init__(self, dtype: str, device: Device, scheme: str) -> None:
        self.kind = torch_dtype(dtype)
        self.device = device
        self.scheme = scheme
        self.dense = scheme == DENSE

    def weight(self, g: torch.Generator, n: int, k: int, *, exact: bool = False, spread: float = 0.5) -> Tensor:
        if not self.dense:
            return random_blocks(g, n, k, self.scheme, exact=exact, spread=spread)
        return integers(g, (n, k), -8, 8, self.kind) if exact else normal(g, (n, k), self.kind, spread)

    def case(
        self,
        name: str,
        m: int | tuple[int, ...],
        k: int,
        n: int,
        *,
        layouts: tuple[str, str] = ("contiguous", "contiguous"),
        bias: str | None = None,
        exact: bool = False,
        draw: Draw | None = None,
        spread: float = 1.0,
        **more: Any,
    ) -> Case:
        lead = m if isinstance(m, tuple) else (m,)
        k = self.whole(k)

        def make(g: torch.Generator) -> dict[str, Any]:
            if draw is not None:
                x = draw(g)
            elif exact:
                x = integers(g, (*lead, k), -12, 12, self.kind)
            else:
                x = normal(g, (*lead, k), self.kind, spread)
            args = {"input": lay(x, layouts[0], self.device), "scheme": self.scheme}
            args["weight"] = lay(self.weight(g, n, k, exact=exact), layouts[1], self.device)
            if bias is not None:
                b = integers(g, (n,), -50, 50, self.kind) if exact else normal(g, (n,), self.kind, 3.0)
                args["bias"] = lay(b, bias, self.device)
            return args

        size = f"{'x'.join(map(str, lead))}/{k}->{n}"
        return Case(f"{name}/{size}/{'+'.join(layouts)}{'/bias' if bias else ''}", make, **more)

    def needles(self, name: str, m: int, k: int, n: int, *, bits: int = 0) -> Case:
        """One value to each row of input, the last column first: a sum of one term is exact, wherever it stands.

        `bits` asks for significands so long that a row which rounds its operands (TF32, bf16) is caught.
        """

        k = self.whole(k)

        def draw(g: torch.Generator) -> Tensor:
            x = torch.zeros(m, k)
            low = 1 << max(bits - 1, 0)
            values = torch.randint(low, 2 * low, (m,), generator=g) | 1
            for row in range(m):
                x[row, (k - 1 - row * 37) % k] = float(values[row])
            return x.to(self.kind)

        return self.case(name, m, k, n, draw=draw)

    def family(self, name: str, m: int) -> Case:
        """Activations of a family times an ordinary weight."""
        k = self.whole(160)
        return self.case(name, m, k, 64, draw=lambda g: FAMILIES[name](g, (m, k), self.kind))

    def whole(self, k: int) -> int:
        """k, or the next multiple of what the scheme's blocks hold."""
        return _whole(k, self.scheme)

    def cancelling(self, m: int, k: int, n: int) -> Case:
        """Large terms that cancel: partial sums leave fp16's range, and bf16's precision, before they come back."""

        def make(g: torch.Generator) -> dict[str, Any]:
            half = integers(g, (m, k // 2), 100, 255, self.kind)
            x = torch.cat((half, -half), dim=1)
            x[:, 0] += 1
            w = torch.full((n, k), 128.0).to(self.kind)
            return {"input": x.to(self.device), "weight": w.to(self.device), "scheme": self.scheme}

        return Case(f"cancelling/{m}/{k}->{n}", make)

    def special(self, m: int, k: int, n: int) -> Case:
        """NaN in one row of the input; dense weights also meet infinity and a NaN of their own."""
        k = self.whole(k)

        def make(g: torch.Generator) -> dict[str, Any]:
            x = normal(g, (m, k), self.kind)
            x[1, k - 1] = float("nan")
            weight = self.weight(g, n, k)
            if self.dense:
                weight = weight.abs() + 0.25
                weight[n - 1, 0] = float("nan")
                x[0, 2] = float("inf")
            return {"input": x.to(self.device), "weight": weight.to(self.device), "scheme": self.scheme}

        return Case(f"special/{m}/{k}->{n}", make)

    def extremes(self) -> list[Case]:
        """Numbers whose exponents differ widely, or blocks whose scales are the largest that the dtype can hold."""
        largest = 500.0 if self.kind == torch.float16 else 65504.0
        k = self.whole(96)

        def spread_out(g: torch.Generator) -> dict[str, Any]:
            x = wide(g, (3, k), self.kind, -12, 4)
            if self.dense:
                weight = wide(g, (21, k), self.kind, -12, 4)
            else:
                weight = _extreme_blocks(g, 21, k, self.scheme, largest)
            return {"input": x.to(self.device), "weight": weight.to(self.device), "scheme": self.scheme}

        return [Case(f"extremes/3/{k}->21", spread_out)]


def linear(dtype: str, device: Device, scheme: str | None = None, *, budget: str = "full") -> list[Case]:
    """Every M bucket, widths with tails, exact sums, single terms, bias, strided operands, special numbers."""
    make = _Linear(dtype, device, scheme or DENSE)
    case, dense = make.case, make.dense
    precision = format_of(make.kind).precision
    strided = ("strided",)
    if not check_budget(budget):
        return [
            case("empty", 0, 64, 33),
            case("plain", 1, 64, 33, bias="contiguous", outs=strided),
            case("plain", 3, 96, 20, layouts=("stepped", "sliced")),
            case("exact", (2, 2), 64, 17, exact=True, bias="stepped"),
            make.needles("needles", 5, 64, 9, bits=min(precision, 14)),
            make.special(2, 32, 8),
            case("parted", (2, 3), 64, 16, layouts=("parted", "contiguous"), outs=("parted",)),
            *([case("plain", 2, 256, 9, layouts=("contiguous", "offset"))] if make.scheme == FP8 else []),
        ]
    if make.scheme in DECODED:
        return _decoded(make, min(precision, 13))
    sizes = [(1, 64, 48), (1, 576, 192), (2, 96, 33), (8, 128, 65)]
    sizes += [(9, 64, 40), (17, 160, 129), (33, 64, 96), (70, 64, 31)]
    layouts = [("offset", "offset"), ("sliced", "sliced"), ("stepped", "contiguous"), ("expanded", "contiguous")]
    layouts += [("transposed", "contiguous")]
    if dense:
        sizes += [(1, 1, 1), (3, 7, 5), (2, 4097, 6), (5, 33, 1)]
        layouts += [("contiguous", "transposed"), ("transposed", "stepped"), ("contiguous", "expanded")]
    else:
        sizes += [(1, 32, 1), (2, 4096, 6), (5, 32, 7)]
        sizes += [(3, 640, 260), (20, 256, 130)] if make.scheme == FP8 else []  # more than one block of rows
    return [
        *(case(f"empty{i}", lead, 64, 32) for i, lead in enumerate(((0,), (2, 0)))),
        *(case("plain", *size) for size in sizes),
        *(case("bias", m, 96, 65, bias="contiguous", outs=strided) for m in (1, 4, 40)),
        case("aliased", 6, 64, 64, outs=("try is:input", "try overlap:input")),
        case("vector", (), 64, 33),
        case("cube", (2, 3), 64, 33, bias="stepped"),
        case("exact", 1, 576, 96, exact=True),
        case("parted", (2, 3), 96, 64, layouts=("parted", "sliced"), bias="contiguous", outs=("parted",)),
        case("parted", (2, 3), 256, 64, layouts=("parted", "contiguous"), outs=("parted",)),
        *(case("many", m, 64, 48, seeds=1) for m in ((265, 1059) if dense else (265,))),
        case("many", (89, 3), 64, 48, layouts=("parted", "sliced"), outs=("parted",), exact=True, seeds=1),
        case("exact", 33, 128, 65, exact=True, bias="contiguous"),
        *(make.needles("needles", m, 96, 33, bits=min(precision, 13)) for m in (1, 5, 40)),
        make.needles("one hot", 96, 96, 40),
        *(case("layout", 5, 96, 33, layouts=pair) for pair in layouts),
        *(case("single row", 1, 96, 64, layouts=pair) for pair in layouts[:4]),
        *make.extremes(),
        make.special(3, 64, 24),
        make.special(1 + 32, 64, 24),
        make.special(3, 128, 64),
        *(case("whole", m, 96, 64, bias="contiguous", outs=strided) for m in (1, 4)),
        *(case("whole", m, 256, 64, outs=strided) for m in (1, 20)),
        *((make.cancelling(2, 200, 9), make.cancelling(40, 64, 9)) if dense else ()),
        case("large", 3, 64, 20, spread=3e3),
        *(make.family(name, m) for name in FAMILIES for m in (1, 5)),
        case("beyond 2^31", 2, 64, 20, layouts=("far", "contiguous"), seeds=1),
        case("beyond 2^31", 2, 64, 3, layouts=("contiguous", "far"), seeds=1),
    ]


def _decoded(make: _Linear, bits: int) -> list[Case]:
    """What tells right from wrong for a weight that is dequantised and multiplied as a dense one; of that, the cases
    of the dense scheme have the rest."""
    case, strided = functools.partial(make.case, seeds=1), ("strided",)
    return [
        case("empty", 0, 64, 32),
        *(case("plain", *size) for size in ((1, 576, 33), (17, 96, 40))),
        case("aliased", 6, 64, 64, outs=("try is:input", "try overlap:input")),
        case("vector", (), 64, 33, bias="stepped"),
        case("parted", (2, 3), 96, 64, layouts=("parted", "sliced"), bias="contiguous", outs=("parted",)),
        case("exact", 33, 128, 65, exact=True, bias="contiguous"),
        make.needles("needles", 5, 96, 33, bits=bits),
        case("layout", 5, 96, 33, layouts=("stepped", "offset")),
        *make.extremes(),
        make.special(3, 64, 24),
        case("whole", 4, 96, 64, bias="contiguous", outs=strided),
    ]
