"""`native/silu_and_mul`: what the conformance suite does not say."""

from __future__ import annotations

import pytest
import torch

from rapid_llm.kernels.ops.activation.silu_and_mul import silu_and_mul
from tests.kernels.devices import DEVICES, DTYPES

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def expected(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, -1)
    return gate * torch.special.expit(gate) * up


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_once(device: str, dtype: torch.dtype) -> None:
    """Catches: silu rounded to 16 bits before the product: then more than half an ulp of error."""
    x = torch.randn(3, 4096, device=device).to(dtype)
    wanted = expected(x)
    half_ulp = torch.finfo(dtype).eps / 2 * 1.01 if dtype != torch.float32 else 4 * torch.finfo(dtype).eps
    error = (silu_and_mul(x).double() - wanted).abs()
    assert bool((error <= wanted.abs() * half_ulp + 1e-7).all()), float((error / wanted.abs()).max())


@pytest.mark.parametrize("device", DEVICES)
def test_saturation(device: str) -> None:
    """Catches: exp overflowing into NaN at strongly negative gates, or +inf lost."""
    gate = torch.tensor([-1e4, -200.0, -90.0, 90.0, 1e30, float("inf"), float("nan")], device=device)
    result = silu_and_mul(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0))[0]
    assert bool((result[:3].abs() < 1e-36).all())
    torch.testing.assert_close(result[3:], gate[3:], rtol=1e-6, atol=0, equal_nan=True)


def test_refusals() -> None:
    """Catches: a gate and an up of unequal width, an `out` inside the input."""
    with pytest.raises(RuntimeError, match=r"silu_and_mul.*even.*7"):
        silu_and_mul(torch.ones(2, 7))
    x = torch.ones(2, 8)
    with pytest.raises(RuntimeError, match=r"silu_and_mul.*overlaps input"):
        silu_and_mul(x, x[:, :4])
    with pytest.raises(RuntimeError, match=r"silu_and_mul.*same shape"):
        silu_and_mul(x, torch.empty(2, 8))
