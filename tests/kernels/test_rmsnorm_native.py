"""`native/rmsnorm`: what the conformance suite does not say."""

from __future__ import annotations

import pytest
import torch

from rapid_llm.kernels.ops.layernorm.rmsnorm import rmsnorm
from tests.kernels.devices import DEVICES

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def expected(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x64 = x.double()
    return x64 / (x64.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, 3])
def test_weight_of_another_dtype(device: str, weight_dtype: torch.dtype, rows: int) -> None:
    """Catches: a weight whose dtype decides the result's, or that is rounded first; one row differing from several."""
    x, weight = torch.randn(rows, 576, device=device), torch.rand(576, device=device).to(weight_dtype)
    result = rmsnorm(x, weight, 1e-5)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected(x, weight, 1e-5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_of_zeros(device: str, rows: int) -> None:
    """Catches: a division by zero that raises, or one hidden by a silent epsilon."""
    x, weight = torch.zeros(rows, 64, device=device), torch.ones(64, device=device)
    assert torch.equal(rmsnorm(x, weight), torch.zeros_like(x))
    assert bool(rmsnorm(x, weight, 0.0).isnan().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("special", [float("nan"), float("inf"), 1e30])
def test_special_values(device: str, rows: int, special: float) -> None:
    """Catches: a NaN that one token's host scalar swallows; the rest of its row must be NaN too, other rows not."""
    x, weight = torch.ones(rows, 64, device=device), torch.ones(64, device=device)
    x[0, 5] = special
    result = rmsnorm(x, weight)
    if special == 1e30:  # its square overflows fp32, in which the op is defined
        assert bool((result[0] == 0).all())
    elif special == float("inf"):
        assert bool(result[0, 5].isnan())
        assert int((result[0] == 0).sum()) == 63
    else:
        assert bool(result[0].isnan().all())
    assert bool(result[1:].isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hidden", [16384, 16385, 40000])
def test_rows_too_long_for_registers(device: str, hidden: int) -> None:
    """Catches: the second way through the kernel (several blocks a row) dropping a tail, also in place."""
    x, weight = torch.randn(2, hidden, device=device), torch.rand(hidden, device=device)
    wanted = expected(x, weight, 1e-6)
    torch.testing.assert_close(rmsnorm(x, weight).double(), wanted, rtol=2e-6, atol=1e-6)
    assert rmsnorm(x, weight, out=x) is x
    torch.testing.assert_close(x.double(), wanted, rtol=2e-6, atol=1e-6)


def test_refusals() -> None:
    """Catches: a weight that broadcasts, an `out` that overlaps in part."""
    x = torch.randn(4, 64)
    with pytest.raises(RuntimeError, match=r"rmsnorm.*same shape.*\(64,\).*\(1,\)"):
        rmsnorm(x, torch.ones(1))
    with pytest.raises(RuntimeError, match=r"rmsnorm.*CUDA"):
        rmsnorm(x, torch.ones(64, device="meta"))
    with pytest.raises(RuntimeError, match=r"rmsnorm.*overlaps input in part"):
        rmsnorm(x[:3], torch.ones(64), out=x[1:])
    with pytest.raises(RuntimeError, match=r"rmsnorm.*same shape"):
        rmsnorm(x, torch.ones(64), out=torch.empty(4, 63))
