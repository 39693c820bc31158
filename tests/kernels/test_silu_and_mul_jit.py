"""`jit/silu_and_mul`: every way through its launcher, against the oracle and its derived bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import jit, registry
from tests.kernels.devices import DTYPES
from tests.kernels.gpu_rows import check, need

pytestmark = pytest.mark.gpu

Silu = Callable[..., Tensor]

HALVES = [1, 7, 8, 33, 128, 1536, 1544, 2048, 2049, 4097, 14336]


@pytest.fixture(scope="module")
def silu_and_mul() -> Silu:
    """The row, built first: a broken toolchain fails here, with its log, and not in the first test of values."""
    function = need(registry.get_row("jit/silu_and_mul"))
    jit.load_jit("silu_and_mul", "activation/silu_and_mul.cu")
    return function  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", HALVES)
def test_values(silu_and_mul: Silu, dtype: torch.dtype, half: int) -> None:
    """Catches: a dropped tail of a row's last chunk, gate and up swapped, a chunk counted to the wrong row."""
    for rows in (1, 3, 200):
        x = (3.0 * torch.randn(rows, 2 * half, device="cuda")).to(dtype)
        out = torch.full((rows, half), float("nan"), device="cuda").to(dtype)
        assert silu_and_mul(x, out) is out
        check("silu_and_mul", {"input": x}, [out])
        assert torch.equal(silu_and_mul(x), out)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced rows": lambda b: b[: 64 * 300].view(64, 300)[:, 8:264],
    "misaligned rows": lambda b: b[: 64 * 300].view(64, 300)[:, 1:257],
    "a half that is misaligned": lambda b: b[: 64 * 256].view(64, 256)[:, :248],
    "two dimensions swapped": lambda b: b[: 6 * 5 * 64].view(6, 5, 64).transpose(0, 1),
    "three that do not merge": lambda b: b[: 4 * 3 * 5 * 2 * 64].view(4, 3, 5, 2, 64)[:, :2, ::2, 0],
    "one row again and again": lambda b: b[:256].view(1, 256).expand(30, 256),
    "one dimension": lambda b: b[:256],
    "a hole": lambda b: b[: 4 * 64].view(4, 64)[:, :0],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_layouts(silu_and_mul: Silu, dtype: torch.dtype, view: str) -> None:
    """Catches: a stride or an offset ignored, a gap written, a 16-byte access where one half is misaligned."""
    x = VIEWS[view](torch.randn(40000, device="cuda").to(dtype))
    result = silu_and_mul(x)
    assert result.is_contiguous()
    check("silu_and_mul", {"input": x}, [result])
    buffer = torch.full((*x.shape[:-1], x.shape[-1]), 7.0, device="cuda").to(dtype)
    out = buffer[..., : x.shape[-1] // 2]
    assert silu_and_mul(x, out) is out
    assert torch.equal(out, result)
    assert bool((buffer[..., x.shape[-1] // 2 :] == 7.0).all())


def test_many_vectors(silu_and_mul: Silu) -> None:
    """Catches: a fault of the unrolled kernel, which only big tensors reach."""
    for half in (14336, 14344):
        x = torch.randn(300, 2 * half, device="cuda", dtype=torch.bfloat16)
        check("silu_and_mul", {"input": x}, [silu_and_mul(x)])


def test_special_values(silu_and_mul: Silu) -> None:
    """Catches: exp(-gate) that overflows into NaN, a NaN or infinity of either half that is swallowed."""
    numbers = [0.0, -0.0, 88.0, -88.0, -88.9, -104.0, 120.0, -3e38, float("inf"), -float("inf"), float("nan")]
    gate, up = (t.flatten() for t in torch.meshgrid(torch.tensor(numbers), torch.tensor(numbers), indexing="ij"))
    # Below -88.7 fp32's sigmoid is 0, which no infinity brings back.
    fit = ~(torch.isinf(up) & torch.isfinite(gate) & (gate < -88.5))
    x = torch.cat((gate[fit], up[fit]))[None].cuda()
    check("silu_and_mul", {"input": x}, [silu_and_mul(x)])


def test_refusals(silu_and_mul: Silu) -> None:
    """Catches: memory of another kind, size or stride that reaches a kernel, and an out that overlaps."""
    x = torch.ones(4, 6, device="cuda")
    for wrong, text in (
        ((x.cpu(),), "CUDA"),
        ((x[:, :5],), "must be even, got 5"),
        ((x, torch.empty(4, 6, device="cuda")), "same shape"),
        ((x, torch.empty(4, 3)), "out must be a CUDA tensor"),
        ((x, torch.empty(4, 3, device="cuda").half()), "dtype"),
        ((x, x[:, :3]), "overlaps"),
        ((x, torch.empty(1, 3, device="cuda").expand(4, 3)), "share memory"),
        ((torch.ones(6, 4, device="cuda").t(),), "contiguous in its last dimension"),
        ((x.int(),), "int32"),
    ):
        with pytest.raises(RuntimeError, match=rf"silu_and_mul.*{text}"):
            silu_and_mul(*wrong)


def test_more_than_2_31_elements(silu_and_mul: Silu) -> None:
    """Catches: a 32-bit offset. 4.3 GB of bf16; rows on both sides of 2**31 elements are looked at."""
    rows = 2**31 // 4096 + 3
    x = torch.full((rows, 4096), 30.0, dtype=torch.bfloat16, device="cuda")
    result = silu_and_mul(x)
    assert bool((result[-4:] == 900.0).all())
    assert bool((result[:4] == 900.0).all())
