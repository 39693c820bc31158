"""`native/fused_add_rmsnorm`: what the conformance suite does not say."""

from __future__ import annotations

import pytest
import torch

from rapid_llm.kernels.ops.layernorm.fused_add_rmsnorm import fused_add_rmsnorm
from tests.kernels.devices import DEVICES

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 2])
def test_norm_reads_the_unrounded_sum(device: str, rows: int) -> None:
    """Catches: a norm of the stored fp16 sum. 2048 + 1 is stored as 2048, and 1 part in 2048 shows in fp16."""
    x = torch.ones(rows, 256, dtype=torch.float16, device=device)
    residual = torch.full_like(x, 2048)
    residual[:, ::2] = 0
    fused_add_rmsnorm(x, residual, torch.ones(256, device=device), 0.0)
    total = torch.full((rows, 256), 2049.0, dtype=torch.float64, device=device)
    total[:, ::2] = 1
    wanted = total / total.square().mean(-1, keepdim=True).sqrt()
    assert torch.equal(x, wanted.float().half())
    assert torch.equal(residual[:, 1::2], torch.full((rows, 128), 2048, dtype=torch.float16, device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_long_rows(device: str) -> None:
    """Catches: the several-blocks way adding the residual twice, because it reads what it has just written."""
    x, residual = torch.randn(2, 2, 40000, device=device)
    weight = torch.rand(40000, device=device)
    total = x.double() + residual.double()
    wanted = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    fused_add_rmsnorm(x, residual, weight)
    torch.testing.assert_close(residual.double(), total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.double(), wanted, rtol=2e-6, atol=2e-6)


def test_refusals() -> None:
    """Catches: overlapping or expanded arguments, which in place have no right answer."""
    buffer, weight = torch.randn(5, 64), torch.ones(64)
    with pytest.raises(RuntimeError, match=r"fused_add_rmsnorm.*overlaps residual"):
        fused_add_rmsnorm(buffer[:4], buffer[1:], weight)
    with pytest.raises(RuntimeError, match=r"fused_add_rmsnorm.*overlaps residual"):
        fused_add_rmsnorm(buffer, buffer, weight)
    with pytest.raises(RuntimeError, match=r"fused_add_rmsnorm.*share memory"):
        fused_add_rmsnorm(buffer[:1].expand(4, 64), torch.randn(4, 64), weight)
    with pytest.raises(RuntimeError, match=r"fused_add_rmsnorm.*same shape"):
        fused_add_rmsnorm(buffer, torch.randn(64), weight)
    with pytest.raises(RuntimeError, match=r"fused_add_rmsnorm.*dtype"):
        fused_add_rmsnorm(buffer, torch.randn(5, 64).half(), weight)
