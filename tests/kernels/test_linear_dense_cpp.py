"""`cpp/linear.bf16` and `cpp/linear.fp16` at every level of vector extensions, beyond the conformance suite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import cpp
from rapid_llm.verify import bounds, oracles
from rapid_llm.verify.compare import compare

pytestmark = pytest.mark.skipif(cpp.available() is not True, reason=f"C++ kernels: {cpp.available()}")
LEVELS = pytest.mark.parametrize("level", cpp.levels(), ids=lambda level: level.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def product(level: cpp.Level, input: Tensor, weight: Tensor, bias: Tensor | None = None, threads: int = 1) -> Tensor:
    out = torch.full((input.shape[0], weight.shape[0]), float("nan"), dtype=input.dtype)
    launcher: Callable[..., None] = cpp.load_cpp("linear_dense", "gemm/linear_dense.cpp", level).linear_dense
    launcher(out, input, weight, bias, threads)
    return out


def check(out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    args = {"input": input, "weight": weight, "bias": bias, "scheme": "unquantized"}
    expected = oracles.linear(**args)
    (limit,) = bounds.linear(args, expected)
    problem = compare(out, expected, limit).problem
    assert problem is None, problem


@LEVELS
@DTYPES
@pytest.mark.parametrize("features", [1, 45, 64, 577])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 9])
def test_every_tile_and_tail(level: cpp.Level, dtype: torch.dtype, features: int, tokens: int) -> None:
    """Catches: a row or a token left out where neither fits the tiles; elements read beyond a row; a bias misplaced."""
    g = torch.Generator().manual_seed(tokens * features)
    for outputs, threads in ((6, 1), (37, 2)):
        input = torch.randn(tokens, features + 3, generator=g).to(dtype)[:, 1 : features + 1]
        weight = torch.randn(outputs, features + 5, generator=g).to(dtype)[:, 2 : features + 2]
        bias = torch.randn(outputs, generator=g).to(dtype)
        check(product(level, input, weight), input, weight)
        check(product(level, input, weight, bias, threads), input, weight, bias)


@LEVELS
@pytest.mark.parametrize("where", ["weight", "input", "both"])
@pytest.mark.parametrize("tokens", [1, 4, 7])
def test_subnormal_operands_count(level: cpp.Level, where: str, tokens: int) -> None:
    """Catches: the CPU's bf16 product, which takes subnormal operands for zeros, where they weigh something."""
    input, weight = torch.ones(tokens, 64), torch.ones(9, 64)
    if where in ("weight", "both"):
        weight[5] = 2.0**-130
        input[:] = 2.0**100
    if where in ("input", "both"):
        input[tokens - 1] = 2.0**-130
        weight[2] = 2.0**100
    input, weight = input.bfloat16(), weight.bfloat16()
    out = product(level, input, weight)
    assert torch.equal(out, (input.double() @ weight.double().T).bfloat16())
    assert (out != 0).sum() >= out.numel() - 1  # subnormal times subnormal is below bf16's range


@LEVELS
@DTYPES
def test_numbers_that_are_none(level: cpp.Level, dtype: torch.dtype) -> None:
    """Catches: a NaN that rounding turns into a number, and padding that makes one of an infinity."""
    input, weight = torch.ones(4, 45, dtype=dtype), torch.ones(6, 45, dtype=dtype)
    input[1, 44], weight[2, 3] = float("inf"), float("nan")
    out = product(level, input, weight)
    assert out[:, 2].isnan().all()
    assert out[1, [0, 1, 3, 4, 5]].isposinf().all()
    assert (out[[0, 2, 3]][:, [0, 1, 3, 4, 5]] == 45).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda i, w: (i, w.half()), "weight must have dtype bfloat16, got float16"),
        (lambda i, w: (i.float(), w.float()), "input must be bfloat16 or float16, got float32"),
        (lambda i, w: (i, w[:, :7]), r"weight \(out_features, in_features\): got \(2, 8\) and \(3, 7\)"),
        (lambda i, w: (i[:, ::2], w[:, ::2]), "input must be contiguous in its last dimension"),
    ],
    ids=["dtypes", "fp32", "widths", "strides"],
)
def test_refusals(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], text: str) -> None:
    """Catches: memory read by another type, width or stride than it has."""
    input, weight = change(torch.ones(2, 8).bfloat16(), torch.ones(3, 8).bfloat16())
    with pytest.raises(RuntimeError, match=text):
        product(cpp.levels()[-1], input, weight)
