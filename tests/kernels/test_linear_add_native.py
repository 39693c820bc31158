"""`native/linear_add`: what the conformance suite does not say."""

from __future__ import annotations

import pytest
import torch

from rapid_llm.kernels.ops.gemm import fused_residual
from rapid_llm.kernels.ops.gemm.fused_residual import linear_add
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from tests.kernels.devices import DEVICES

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("device", DEVICES)
def test_the_product_is_not_rounded(device: str) -> None:
    """Catches: a product stored in fp16 before it is added. 2049 is none of fp16; 2049 - 2048 is."""
    x = torch.ones(3, 16, dtype=torch.float16, device=device)
    weight = torch.full((5, 16), 128.0, dtype=torch.float16, device=device)
    weight[:, 0] = 129
    residual = torch.full((3, 5), -2048.0, dtype=torch.float16, device=device)
    linear_add(x, weight, residual)
    assert torch.equal(residual, torch.ones_like(residual))


@pytest.mark.skipif(INTERPRETED, reason="Triton widens nothing")
@pytest.mark.parametrize("outputs", [0, 1, 7, 9])
def test_weights_are_widened_by_pieces(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a piece lost, doubled or out of place; a whole weight in fp32."""
    monkeypatch.setattr(fused_residual, "PIECE", 3 * 64)
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 2, 64, generator=g).bfloat16(), torch.randn(outputs, 64, generator=g).bfloat16()
    residual = torch.randn(2, 2, outputs, generator=g).bfloat16()
    wanted = (x.double() @ weight.double().T + residual.double()).bfloat16()
    linear_add(x, weight, residual)
    torch.testing.assert_close(residual, wanted, rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_features(dtype: torch.dtype) -> None:
    """Catches: an empty sum that is no zero."""
    residual = torch.arange(6.0).view(2, 3).to(dtype)
    kept = residual.clone()
    linear_add(torch.zeros(2, 0, dtype=dtype), torch.zeros(3, 0, dtype=dtype), residual)
    assert torch.equal(residual, kept)


def test_refusals() -> None:
    """Catches: shapes that would broadcast, and a residual whose memory is read, or written twice."""
    x, weight, residual = torch.randn(4, 8), torch.randn(8, 8), torch.randn(4, 8)
    for args, said in (
        ((x, weight, torch.randn(8)), r"linear_add: residual must have the same shape, \(4, 8\): got \(8,\)"),
        ((x, weight, residual.half()), r"linear_add: residual must have dtype torch.float32"),
        ((x, weight.half(), residual), r"linear_add: weight must have dtype torch.float32"),
        ((x, weight[:, :4], residual), r"linear_add: weight and input do not meet.*rows of 8, got \(8, 4\)"),
        ((x, weight[0], residual), r"linear_add: input needs a last dimension and weight two"),
        ((x, weight, x), r"linear_add: residual overlaps input"),
        ((x, weight, weight[:4]), r"linear_add: residual overlaps weight"),
        ((x, weight, residual[:1].expand(4, 8)), r"linear_add: elements of residual share memory"),
    ):
        with pytest.raises(RuntimeError, match=said):
            linear_add(*args)
