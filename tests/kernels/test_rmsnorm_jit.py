"""`jit/rmsnorm`: every way through its launcher, against the oracle and its derived bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import jit, registry
from tests.kernels.devices import DTYPES
from tests.kernels.gpu_rows import check, need

pytestmark = pytest.mark.gpu

Norm = Callable[..., Tensor]

HIDDEN = [1, 2, 7, 8, 64, 128, 256, 264, 576, 577, 1000, 1024, 1032, 2048, 4096, 4097, 8192, 16384, 16392, 32768, 40000]
"""A warp a row, blocks of one to four vectors a thread, tails, and rows too long for registers."""

ROWS = [1, 3, 264, 265, 1057]
"""On both sides of every threshold of the launcher."""


def rows_for(hidden: int) -> list[int]:
    """All of them for short rows; the oracle takes its time."""
    return ROWS if hidden <= 1032 else [3, 265]


@pytest.fixture(scope="module")
def rmsnorm() -> Norm:
    """The row, built first: a broken toolchain fails here, with its log, and not in the first test of values."""
    function = need(registry.get_row("jit/rmsnorm"))
    jit.load_jit("rmsnorm", "layernorm/rmsnorm.cu")
    return function  # type: ignore[no-any-return]


def compare(input: Tensor, weight: Tensor, result: Tensor, eps: float = 1e-6) -> None:
    values: dict[str, Any] = {"input": input, "weight": weight, "eps": eps}
    check("rmsnorm", values, [result])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_values(rmsnorm: Norm, dtype: torch.dtype, hidden: int) -> None:
    """Catches: a dropped tail, a row answered by another's sum, a vector count that a block does not hold."""
    weight = torch.randn(hidden, device="cuda").to(dtype)
    for rows in rows_for(hidden):
        x = torch.randn(rows, hidden, device="cuda").to(dtype)
        out = torch.full_like(x, float("nan"))
        assert rmsnorm(x, weight, 1e-6, out) is out
        compare(x, weight, out)
        assert torch.equal(rmsnorm(x, weight), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weight_of_another_dtype(rmsnorm: Norm, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Catches: a weight read as if it had the input's dtype, or rounded to it."""
    for hidden in (33, 576, 4096, 20000):
        x, weight = torch.randn(3, hidden, device="cuda").to(dtype), torch.rand(hidden, device="cuda").to(weight_dtype)
        compare(x, weight.float(), rmsnorm(x, weight))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced rows": lambda b: b[: 64 * 300].view(64, 300)[:, 8:264],
    "misaligned rows": lambda b: b[: 64 * 300].view(64, 300)[:, 1:257],
    "misaligned start": lambda b: b[1 : 1 + 64 * 256].view(64, 256),
    "odd stride": lambda b: b[: 64 * 259].view(64, 259)[:, :256],
    "heads of a fused projection": lambda b: b[: 10 * 12 * 128].view(10, 12, 128)[:, 2:7],
    "two dimensions swapped": lambda b: b[: 6 * 5 * 64].view(6, 5, 64).transpose(0, 1),
    "three that do not merge": lambda b: b[: 4 * 3 * 5 * 2 * 64].view(4, 3, 5, 2, 64)[:, :2, ::2, 0],
    "one row again and again": lambda b: b[:256].view(1, 256).expand(300, 256),
    "a hole": lambda b: b[: 4 * 64].view(4, 64)[:0],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_layouts(rmsnorm: Norm, dtype: torch.dtype, view: str) -> None:
    """Catches: a stride or an offset ignored, a gap written, a result in the input's layout."""
    x = VIEWS[view](torch.randn(40000, device="cuda").to(dtype))
    weight = torch.randn(x.shape[-1], device="cuda").to(dtype)
    result = rmsnorm(x, weight)
    assert result.is_contiguous()
    compare(x, weight, result)
    buffer = torch.full((3 * 40000,), 7.0, device="cuda").to(dtype)
    out = VIEWS[view](buffer[40000:80000])
    if "again" in view:
        with pytest.raises(RuntimeError, match=r"rmsnorm: elements of out share memory"):
            rmsnorm(x, weight, 1e-6, out)
        return
    assert rmsnorm(x, weight, 1e-6, out) is out
    assert torch.equal(out, result)
    assert int((buffer != 7.0).sum()) <= out.numel()


def test_aliasing(rmsnorm: Norm) -> None:
    """Catches: a partial overlap answered wrongly in silence; in place refused, or wrong for rows read twice."""
    for hidden in (96, 97, 40000):
        x, weight = torch.randn(5, hidden, device="cuda"), torch.randn(hidden, device="cuda")
        before = x.clone()
        rmsnorm(x, weight, 1e-6, x)
        compare(before, weight, x)
    grid, weight = torch.randn(20, 128, device="cuda"), torch.randn(64, device="cuda")
    with pytest.raises(RuntimeError, match=r"rmsnorm.*overlaps input in part"):
        rmsnorm(grid[:, :64], weight, 1e-6, grid[:, 32:96])
    with pytest.raises(RuntimeError, match=r"rmsnorm.*overlaps weight"):
        rmsnorm(grid[:1, :64], grid[0, 64:], 1e-6, grid[:1, 64:])
    # Interleaved columns of one buffer share no element.
    before = grid.clone()
    rmsnorm(grid[:, :64], weight, 1e-6, grid[:, 64:])
    compare(before[:, :64], weight, grid[:, 64:])


def test_special_values(rmsnorm: Norm) -> None:
    """Catches: a NaN that is swallowed, one row's NaN in another, a clamp where the square overflows."""
    x, weight = torch.ones(6, 64, device="cuda"), torch.ones(64, device="cuda")
    x[0, 5], x[1, 63], x[2, 0], x[3] = float("nan"), float("inf"), 1e30, 0.0
    result = rmsnorm(x, weight)
    assert bool(result[0].isnan().all())
    assert bool(result[1, 63].isnan())
    assert int((result[1] == 0).sum()) == 63
    assert bool((result[2:4] == 0).all())
    assert bool(result[4:].isfinite().all())
    assert bool(rmsnorm(x, weight, 0.0)[3].isnan().all())


def test_refusals(rmsnorm: Norm) -> None:
    """Catches: memory of another kind, size or stride that reaches a kernel."""
    x, weight = torch.ones(4, 6, device="cuda"), torch.ones(6, device="cuda")
    for wrong, text in (
        ((x.cpu(), weight), "CUDA"),
        ((x, weight.cpu()), "weight must be a CUDA tensor"),
        ((x, weight[:5]), "same shape as a row"),
        ((x, torch.ones(12, device="cuda")[::2]), "weight must be contiguous"),
        ((x, weight.int()), "floating"),
        ((x, weight, 1e-6, torch.empty(4, 5, device="cuda")), "same shape"),
        ((x, weight, 1e-6, torch.empty(4, 6)), "out must be a CUDA tensor"),
        ((x, weight, 1e-6, torch.empty(4, 6, device="cuda").half()), "dtype"),
        ((torch.ones(6, 4, device="cuda").t(), weight), "contiguous in its last dimension"),
        ((x.int(), weight), "int32"),
    ):
        with pytest.raises(RuntimeError, match=rf"rmsnorm.*{text}"):
            rmsnorm(*wrong)


@pytest.mark.parametrize("hidden", [4096, 4097])
def test_more_than_2_31_elements(rmsnorm: Norm, hidden: int) -> None:
    """Catches: a 32-bit offset. 4.3 GB of bf16 in place; rows on both sides of 2**31 elements are looked at."""
    rows = 2**31 // hidden + 3
    x = torch.full((rows, hidden), 3.0, dtype=torch.bfloat16, device="cuda")
    rmsnorm(x, torch.full((hidden,), 2.0, dtype=torch.bfloat16, device="cuda"), 0.0, x)
    assert bool((x[-4:] == 2.0).all())
    assert bool((x[:4] == 2.0).all())
