"""`torch/linear`: what the conformance suite, which needs a GPU for it, does not say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rapid_llm.kernels.ops.gemm import linear_cublas
from rapid_llm.kernels.registry import ArgumentError

SETTINGS = torch.backends.cuda.matmul
NAMES = linear_cublas._LOOSE


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    before = {name: getattr(SETTINGS, name) for name in NAMES}
    yield
    for name, value in before.items():
        setattr(SETTINGS, name, value)


@pytest.mark.parametrize("name", NAMES)
def test_no_product_sums_in_less_than_fp32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a product under torch's default, which lets cuBLAS add parts in bf16, and a setting of the user's that
    is not what it was after the call, or after one that raised."""
    setattr(SETTINGS, name, True)
    during: list[bool] = []

    def product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        during.append(getattr(SETTINGS, name))
        if len(during) > 1:
            raise RuntimeError("broken")
        return input @ weight.T

    monkeypatch.setattr(linear_cublas, "exact_linear", product)
    x, w = torch.ones(2, 8), torch.ones(4, 8)
    assert linear_cublas.linear(x, w).tolist() == [[8.0] * 4] * 2
    assert getattr(SETTINGS, name) is True
    with pytest.raises(RuntimeError, match="broken"):
        linear_cublas.linear(x, w)
    assert getattr(SETTINGS, name) is True
    assert during == [False, False]
    linear_cublas.keep_full_sums()
    assert not any(getattr(SETTINGS, other) for other in NAMES)


def test_arguments() -> None:
    """Catches: a bias, an out or a weight that does not fit and is broadcast or read beyond its end."""
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    out = torch.empty(3, 4)
    assert linear_cublas.linear(x, w, torch.ones(4), out) is out
    assert torch.allclose(out.double(), x.double() @ w.double().T + 1, rtol=0, atol=8 * 8 * 2.0**-24 * 8)
    for arguments in ((x, w[:, :7]), (x, w, torch.ones(3)), (x, w.half()), (x, w, None, torch.empty(4, 3))):
        with pytest.raises(ArgumentError, match="linear"):
            linear_cublas.linear(*arguments)
    both = torch.randn(4, 4)
    with pytest.raises(ArgumentError, match="out"):
        linear_cublas.linear(both, w[:, :4], None, both)
