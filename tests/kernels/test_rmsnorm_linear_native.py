"""`native/rmsnorm_linear` and `native/rmsnorm_linear_silu_and_mul`: what the conformance suite does not say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapid_llm.kernels.ops.gemm.fused_norm import rmsnorm_linear, rmsnorm_linear_silu_and_mul
from tests.kernels.devices import DEVICES

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def _arguments(device: str) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    drawn = (torch.randn(3, 40, generator=g), torch.rand(40, generator=g), torch.randn(24, 40, generator=g))
    return tuple(t.to(device) for t in drawn)


@pytest.mark.parametrize("device", DEVICES)
def test_equal_to_torch(device: str) -> None:
    """Catches: halves, a bias or an eps in another's place. The oracle is torch in fp64."""
    x, scale, weight = _arguments(device)
    bias = torch.arange(24.0, device=device)
    normed = torch.nn.functional.rms_norm(x.double(), (40,), scale.double(), 0.3)
    wanted = torch.nn.functional.linear(normed, weight.double(), bias.double())
    torch.testing.assert_close(rmsnorm_linear(x, scale, weight, bias, 0.3).double(), wanted, rtol=1e-5, atol=1e-5)
    gate, up = torch.nn.functional.linear(normed, weight.double()).chunk(2, -1)
    result = rmsnorm_linear_silu_and_mul(x, scale, weight, 0.3)
    torch.testing.assert_close(result.double(), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-5)


def test_refusals() -> None:
    """Catches: shapes that would broadcast, and results in the memory of what is read."""
    x, scale, weight = _arguments("cpu")
    out: dict[str, Any] = {"out": torch.empty(3, 24)}
    for args, keywords, said in (
        ((x, scale[:1], weight), {}, r"norm_weight must have the same shape as a row of input, \(40,\): got \(1,\)"),
        ((x, scale.half(), weight), {}, r"norm_weight must have dtype torch.float32, got torch.float16"),
        ((x, scale.to("meta"), weight), {}, r"norm_weight is on meta, input on cpu"),
        ((x, scale, weight[:, :8]), {}, r"weight and input do not meet in the same shape"),
        ((x, scale, weight, torch.zeros(1)), {}, r"bias must have the same shape, \(24,\): got \(1,\)"),
        ((x, scale, weight), {"out": out["out"][:, :20]}, r"out must have the same shape, \(3, 24\)"),
        ((x, scale, weight), {"out": weight.view(-1)[:72].view(3, 24)}, r"out overlaps weight"),
    ):
        with pytest.raises(RuntimeError, match=f"rmsnorm_linear: {said}"):
            rmsnorm_linear(*args, **keywords)
    with pytest.raises(RuntimeError, match=r"rmsnorm_linear_silu_and_mul: weight holds rows of gate and of up"):
        rmsnorm_linear_silu_and_mul(x, scale, weight[:23])
    assert rmsnorm_linear(x, scale, weight, **out) is out["out"]
