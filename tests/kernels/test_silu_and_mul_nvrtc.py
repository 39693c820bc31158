"""`nvrtc/silu_and_mul`: every kernel that its wrapper chooses, against the oracle and its derived bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import registry
from tests.kernels.devices import DTYPES
from tests.kernels.gpu_rows import check, need

pytestmark = pytest.mark.gpu

Silu = Callable[..., Tensor]


@pytest.fixture(scope="module")
def silu_and_mul() -> Silu:
    """The row, built first: a broken library fails here, with its log, and not in the first test of values."""
    function = need(registry.get_row("nvrtc/silu_and_mul"))
    function(torch.ones(2, 8, device="cuda"))
    return function  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [1, 8, 100, 2048, 2056, 4097, 28672])
def test_values(silu_and_mul: Silu, dtype: torch.dtype, half: int) -> None:
    """Catches: a dropped tail, gate and up exchanged, a chunk that no block has."""
    for rows in (0, 1, 3, 200):
        x = (4 * torch.randn(rows, 2 * half, device="cuda")).to(dtype)
        out = torch.full((rows, half), float("nan"), dtype=dtype, device="cuda")
        assert silu_and_mul(x, out) is out
        check("silu_and_mul", {"input": x}, [out])
        assert torch.equal(silu_and_mul(x), out)


def test_misaligned(silu_and_mul: Silu) -> None:
    """Catches: a 16-byte access at an odd address."""
    x = torch.randn(1 + 4 * 512, device="cuda")[1:].view(4, 512)
    check("silu_and_mul", {"input": x}, [silu_and_mul(x)])


def test_refusals(silu_and_mul: Silu) -> None:
    """Catches: memory of another kind, size or stride that reaches a kernel."""
    x = torch.ones(4, 12, device="cuda")
    for wrong, text in (
        ((x.cpu(),), "CUDA"),
        ((x[:, :11].contiguous(),), "even"),
        ((x, torch.empty(4, 6)), "out must be a CUDA tensor"),
        ((x, torch.empty(4, 12, device="cuda")), "same shape"),
        ((x, torch.empty(4, 6, device="cuda").half()), "dtype"),
        ((x.t(),), "contiguous"),
        ((x.int(),), "int32"),
        ((x, x.view(-1)[:24].view(4, 6)), "overlaps input"),
    ):
        with pytest.raises(RuntimeError, match=rf"silu_and_mul.*{text}"):
            silu_and_mul(*wrong)
