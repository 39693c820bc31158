"""`nvrtc/rmsnorm`: every kernel that its wrapper chooses, against the oracle and its derived bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import registry
from tests.kernels.devices import DTYPES
from tests.kernels.gpu_rows import check, need

pytestmark = pytest.mark.gpu

Norm = Callable[..., Tensor]
HIDDEN = [1, 7, 8, 128, 256, 264, 577, 1024, 1032, 4096, 4097, 8192, 16384, 16392, 40000]


@pytest.fixture(scope="module")
def rmsnorm() -> Norm:
    """The row, built first: a broken library fails here, with its log, and not in the first test of values."""
    function = need(registry.get_row("nvrtc/rmsnorm"))
    function(torch.ones(2, 8, device="cuda"), torch.ones(8, device="cuda"))
    return function  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_values(rmsnorm: Norm, dtype: torch.dtype, hidden: int) -> None:
    """Catches: a dropped tail, a row answered by another's sum, a vector count that a block does not hold."""
    weight = torch.randn(hidden, device="cuda").to(dtype)
    for rows in (0, 1, 3, 264, 265, 1057) if hidden <= 1032 else (3, 265):
        x = torch.randn(rows, hidden, device="cuda").to(dtype)
        out = torch.full_like(x, float("nan"))
        assert rmsnorm(x, weight, 1e-6, out) is out
        check("rmsnorm", {"input": x, "weight": weight, "eps": 1e-6}, [out])
        assert torch.equal(rmsnorm(x, weight), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weight_of_another_dtype(rmsnorm: Norm, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Catches: a weight read as if it had the input's dtype, or rounded to it."""
    for hidden in (33, 576, 4096, 20000):
        x, weight = torch.randn(3, hidden, device="cuda").to(dtype), torch.rand(hidden, device="cuda").to(weight_dtype)
        check("rmsnorm", {"input": x, "weight": weight.float(), "eps": 1e-6}, [rmsnorm(x, weight)])


def test_misaligned_and_in_place(rmsnorm: Norm) -> None:
    """Catches: a 16-byte access at an odd address; rows that are read after they were written."""
    for hidden in (96, 97, 40000):
        x = torch.randn(1 + 5 * hidden, device="cuda")[1:].view(5, hidden)
        weight, before = torch.randn(hidden, device="cuda"), x.clone()
        rmsnorm(x, weight, 1e-6, x)
        check("rmsnorm", {"input": before, "weight": weight, "eps": 1e-6}, [x])


def test_refusals(rmsnorm: Norm) -> None:
    """Catches: memory of another kind, size or stride that reaches a kernel."""
    x, weight = torch.ones(4, 6, device="cuda"), torch.ones(6, device="cuda")
    flat = torch.ones(48, device="cuda")
    for wrong, text in (
        ((x.cpu(), weight), "CUDA"),
        ((x, weight.cpu()), "weight must be a CUDA tensor"),
        ((x, weight[:5]), "same shape as a row"),
        ((x, torch.ones(12, device="cuda")[::2]), "weight must be contiguous"),
        ((x, weight.int()), "floating"),
        ((x, weight, 1e-6, torch.empty(4, 5, device="cuda")), "same shape"),
        ((x, weight, 1e-6, torch.empty(4, 6)), "out must be a CUDA tensor"),
        ((x, weight, 1e-6, torch.empty(4, 6, device="cuda").half()), "dtype"),
        ((torch.ones(6, 4, device="cuda").t(), weight), "contiguous"),
        ((x.int(), weight), "int32"),
        ((flat[:24].view(4, 6), weight, 1e-6, flat[6:30].view(4, 6)), "overlaps input in part"),
        ((flat[:24].view(4, 6), flat[24:30], 1e-6, flat[24:48].view(4, 6)), "overlaps weight"),
    ):
        with pytest.raises(RuntimeError, match=rf"rmsnorm.*{text}"):
            rmsnorm(*wrong)
