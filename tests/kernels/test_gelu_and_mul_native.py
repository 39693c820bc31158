"""`native/gelu_and_mul`: what the conformance suite does not say."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu

from rapid_llm.kernels.ops.activation.gelu_and_mul import gelu_and_mul
from tests.kernels.devices import DEVICES, DTYPES

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_torchs_tanh_form(device: str, dtype: torch.dtype) -> None:
    """Catches: the erf form, constants of another form, or gelu rounded to 16 bits before the product."""
    x = torch.randn(3, 4096, device=device).to(dtype)
    gate, up = x.double().chunk(2, -1)
    wanted = gelu(gate, approximate="tanh") * up
    half_ulp = torch.finfo(dtype).eps / 2 * 1.01 if dtype != torch.float32 else 6 * torch.finfo(dtype).eps
    error = (gelu_and_mul(x).double() - wanted).abs()
    assert bool((error <= wanted.abs() * half_ulp + 1e-7).all()), float((error / wanted.abs()).max())


@pytest.mark.parametrize("device", DEVICES)
def test_saturation(device: str) -> None:
    """Catches: an exponential or a square that overflows into NaN, +inf lost, a negative tail that is 0 too early."""
    gate = torch.tensor([-1e30, -200.0, -5.0, 90.0, 1e30, float("inf"), float("nan")], device=device)
    result = gelu_and_mul(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0))[0]
    assert bool((result[:2] == 0).all())
    # -5 / (1 + exp(2 u)), u = 0.7978845608 (5 + 0.044715 * 125), in decimal arithmetic
    torch.testing.assert_close(result[2], torch.tensor(-2.2917961966e-7, device=device), rtol=1e-5, atol=0)
    torch.testing.assert_close(result[3:], gate[3:], rtol=1e-6, atol=0, equal_nan=True)


def test_refusals() -> None:
    """Catches: a gate and an up of unequal width, an `out` inside the input."""
    with pytest.raises(RuntimeError, match=r"gelu_and_mul.*even.*7"):
        gelu_and_mul(torch.ones(2, 7))
    x = torch.ones(2, 8)
    with pytest.raises(RuntimeError, match=r"gelu_and_mul.*overlaps input"):
        gelu_and_mul(x, x[:, :4])
    with pytest.raises(RuntimeError, match=r"gelu_and_mul.*same shape"):
        gelu_and_mul(x, torch.empty(2, 8))
