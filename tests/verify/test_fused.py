"""Bounds and work of linear with its neighbours, beyond what every op is asked."""

from __future__ import annotations

import pytest
import torch

from rapid_llm.verify import fused
from rapid_llm.verify.compare import compare
from rapid_llm.verify.ulp import half_ulp, round_to
from rapid_llm.verify.work import Work


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_number_known_within_an_error_may_be_rounded(dtype: torch.dtype) -> None:
    """Catches: a bound that forgets that the error may move a number across a tie, or one that allows half an ulp
    where a number can hardly be rounded at all."""
    g = torch.Generator().manual_seed(0)
    value = torch.randn(4000, generator=g, dtype=torch.float64)
    value[:1000] = round_to(value[:1000], dtype)
    value[1000:2000] = round_to(value[1000:2000], dtype) + half_ulp(value[1000:2000], dtype)  # ties
    for size in (0.0, 2.0**-20, 2.0**-6):
        error = torch.full_like(value, size)
        moved = value + error * (2 * torch.rand(value.shape, generator=g, dtype=torch.float64) - 1)
        limit = fused._rounded(value, error, dtype)
        assert bool(((round_to(moved, dtype) - value).abs() <= limit).all())
        assert bool(((moved - value).abs() <= limit).all())
        assert bool((limit[:1000] <= 2 * size).all())
    assert torch.equal(fused._rounded(value, error, torch.float32), error)


def test_a_normed_row_may_be_rounded_to_its_dtype_and_no_further() -> None:
    """Catches: a bound under which an fp32 row may pass through bf16, or a bf16 one may not."""
    g = torch.Generator().manual_seed(0)
    for dtype, fits in ((torch.bfloat16, True), (torch.float32, False)):
        args = {
            "input": torch.randn(3, 64, generator=g).to(dtype),
            "norm_weight": torch.rand(64, generator=g).to(dtype),
            "weight": torch.randn(9, 64, generator=g).to(dtype),
            "eps": 1e-5,
        }
        expected = fused.rmsnorm_linear(**args)
        (bound,) = fused.rmsnorm_linear_bound(args, expected)
        normed = torch.nn.functional.rms_norm(args["input"].double(), (64,), args["norm_weight"].double(), 1e-5)
        rounded = (normed.bfloat16().double() @ args["weight"].double().T).to(dtype)
        assert (compare(rounded, expected, bound).problem is None) == fits
        assert compare(round_to(expected, dtype).to(dtype), expected, bound).problem is None


def test_work() -> None:
    """Catches: a residual that is not read or not written, rows of gate and up that are counted once, and what passes
    between the parts counted as traffic."""
    x, weight, scale = torch.zeros(2, 3, 8).half(), torch.zeros(10, 8).half(), torch.zeros(8)
    got = fused.linear_add_work(input=x, weight=weight, residual=torch.zeros(2, 3, 10).half())
    assert got == Work((48 + 80 + 60) * 2, 60 * 2, 60 * 17)
    got = fused.rmsnorm_linear_work(input=x, norm_weight=scale, weight=weight, bias=weight[:, 0])
    assert got == Work((48 + 80 + 10) * 2 + 32, 60 * 2, 4 * 48 + 60 * 17)
    got = fused.rmsnorm_linear_silu_and_mul_work(input=x, norm_weight=scale, weight=weight)
    assert got == Work((48 + 80) * 2 + 32, 30 * 2, 4 * 48 + 30 * (2 * 16 + 5))
