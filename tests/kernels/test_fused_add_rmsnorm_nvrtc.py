"""`nvrtc/fused_add_rmsnorm`: every kernel that its wrapper chooses, against the oracle and its derived bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import registry
from tests.kernels.devices import DTYPES
from tests.kernels.gpu_rows import check, need

pytestmark = pytest.mark.gpu

Norm = Callable[..., None]
HIDDEN = [1, 7, 8, 128, 256, 264, 577, 1024, 1032, 4096, 4097, 8192, 16384, 16392, 40000]


@pytest.fixture(scope="module")
def norm() -> Norm:
    """The row, built first: a broken library fails here, with its log, and not in the first test of values."""
    function = need(registry.get_row("nvrtc/fused_add_rmsnorm"))
    x = torch.ones(2, 8, device="cuda")
    function(x, x.clone(), torch.ones(8, device="cuda"))
    return function  # type: ignore[no-any-return]


def compare(norm: Norm, x: Tensor, residual: Tensor, weight: Tensor) -> None:
    values = {"input": x.clone(), "residual": residual.clone(), "weight": weight, "eps": 1e-6}
    assert norm(x, residual, weight) is None
    check("fused_add_rmsnorm", values, [x, residual])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_values(norm: Norm, dtype: torch.dtype, hidden: int) -> None:
    """Catches: a dropped tail, the rounded sum normed, a vector count that a block does not hold."""
    weight = torch.randn(hidden, device="cuda").to(dtype)
    for rows in (0, 1, 3, 264, 265, 1057) if hidden <= 1032 else (3, 265):
        x, residual = (torch.randn(rows, hidden, device="cuda").to(dtype) for _ in range(2))
        compare(norm, x, residual, weight)


def test_misaligned(norm: Norm) -> None:
    """Catches: a 16-byte access at an odd address."""
    for hidden in (96, 97, 40000):
        x = torch.randn(1 + 5 * hidden, device="cuda")[1:].view(5, hidden)
        compare(norm, x, torch.randn(5, hidden, device="cuda"), torch.randn(hidden, device="cuda"))


def test_refusals(norm: Norm) -> None:
    """Catches: memory of another kind, size or stride that reaches a kernel, or two arguments in one place."""
    x, residual, weight = torch.ones(4, 6, device="cuda"), torch.ones(4, 6, device="cuda"), torch.ones(6, device="cuda")
    flat = torch.ones(48, device="cuda")
    for wrong, text in (
        ((x.cpu(), residual, weight), "CUDA"),
        ((x, residual.cpu(), weight), "residual must be a CUDA tensor"),
        ((x, residual[:3], weight), "same shape"),
        ((x, residual.half(), weight), "dtype"),
        ((x, x, weight), "input overlaps residual"),
        ((x, residual, x[0]), "input overlaps weight"),
        ((x, flat[:24].view(4, 6), flat[:6]), "residual overlaps weight"),
        ((torch.ones(6, 4, device="cuda").t(), residual, weight), "contiguous"),
        ((x, residual, weight[:5]), "same shape as a row"),
    ):
        with pytest.raises(RuntimeError, match=rf"fused_add_rmsnorm.*{text}"):
            norm(*wrong)
