"""`nvrtc/scale` against the product in float64, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import registry
from tests.kernels.devices import DTYPES
from tests.kernels.gpu_rows import need
from tests.kernels.test_scale_native import FACTORS, SIZES, expected

pytestmark = pytest.mark.gpu

Scale = Callable[..., Tensor]


@pytest.fixture(scope="module")
def scale() -> Scale:
    """The row, built first: a broken library fails here, with its log, and not in the first test of values."""
    function = need(registry.get_row("nvrtc/scale"))
    function(torch.ones(8, device="cuda"), 2.0)
    return function  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [*SIZES, 8 * 256 * 1024, 8 * 256 * 1024 + 8 * 1024 + 5])
def test_values(scale: Scale, dtype: torch.dtype, size: int) -> None:
    """Catches: a dropped tail, an empty grid, a factor rounded to the tensor's dtype (0.3), a product rounded twice."""
    x = torch.randn(size, device="cuda").to(dtype)
    for factor in FACTORS:
        result = scale(x, factor)
        torch.testing.assert_close(result, expected(x, factor), rtol=0, atol=0)
        out = torch.full_like(x, float("nan"))
        assert scale(x, factor, out) is out
        assert torch.equal(out, result)


@pytest.mark.parametrize("factor", [0.0, float("inf"), float("nan"), 1e300])
def test_special_values(scale: Scale, factor: float) -> None:
    """Catches: a NaN swallowed, an overflow clamped, a subnormal flushed, a factor beyond fp32 that raises."""
    x = torch.tensor([float("nan"), float("inf"), 3e38, 1e-45, 1.0], device="cuda")
    torch.testing.assert_close(scale(x, factor), expected(x, factor), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 4, 7])
def test_misaligned(scale: Scale, dtype: torch.dtype, offset: int) -> None:
    """Catches: a 16-byte access at an address that is none's multiple, a write before or behind the view."""
    x = torch.randn(5000, device="cuda").to(dtype)
    buffer = torch.full((5000,), 7.0, dtype=dtype, device="cuda")
    out = buffer[offset : offset + 4097]
    scale(x[3 : 3 + 4097], 0.3, out)
    torch.testing.assert_close(out, expected(x[3 : 3 + 4097], 0.3), rtol=0, atol=0)
    assert bool((buffer[:offset] == 7.0).all())
    assert bool((buffer[offset + 4097 :] == 7.0).all())


def test_aliasing(scale: Scale) -> None:
    """Catches: a partial overlap answered wrongly in silence; `out is input` refused."""
    buffer = torch.randn(1000, device="cuda")
    wanted = expected(buffer, 2.0)
    assert scale(buffer, 2.0, buffer) is buffer
    assert torch.equal(buffer, wanted)
    with pytest.raises(RuntimeError, match=r"scale.*overlaps input in part"):
        scale(buffer[:-1], 2.0, buffer[1:])


def test_refusals(scale: Scale) -> None:
    """Catches: memory of another kind, size or stride that reaches a kernel."""
    x = torch.ones(4, 6, device="cuda")
    for wrong, text in (
        ((x.cpu(), 2.0), "CUDA"),
        ((x, 2.0, torch.empty(4, 6)), "out must be a CUDA tensor"),
        ((x, 2.0, torch.empty(4, 1, device="cuda")), "same shape"),
        ((x, 2.0, torch.empty(4, 6, dtype=torch.float16, device="cuda")), r"dtype torch\.float32"),
        ((x.int(), 2.0), "int32"),
        ((x.t(), 2.0), "contiguous"),
        ((x, 2.0, torch.empty(6, 4, device="cuda").t()), "contiguous"),
        ((torch._neg_view(x), 2.0), "lazy negation"),
    ):
        with pytest.raises(RuntimeError, match=rf"scale.*{text}"):
            scale(*wrong)


def test_more_than_2_31_elements(scale: Scale) -> None:
    """Catches: a 32-bit index. 4.3 GB of bf16 in place; the last block and one beyond 2**31 are looked at."""
    x = torch.full((2**31 + 4097,), 3.0, dtype=torch.bfloat16, device="cuda")
    scale(x, 2.0, x)
    assert bool((x[-5000:] == 6.0).all())
    assert bool((x[:5000] == 6.0).all())
