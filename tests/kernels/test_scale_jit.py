"""`jit/scale` against the product in float64, and what its launcher refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import jit, registry
from tests.kernels.devices import DTYPES
from tests.kernels.gpu_rows import need
from tests.kernels.test_scale_native import FACTORS, SIZES, expected

pytestmark = pytest.mark.gpu

Scale = Callable[..., Tensor]


@pytest.fixture(scope="module")
def scale() -> Scale:
    """The row, built first: a broken toolchain fails here, with its log, and not in the first test of values."""
    function = need(registry.get_row("jit/scale"))
    jit.load_jit("scale", "elementwise/scale.cu")
    return function  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_values(scale: Scale, dtype: torch.dtype, size: int) -> None:
    """Catches: a dropped tail, an empty grid, a factor rounded to the tensor's dtype (0.3), a product rounded twice."""
    x = torch.randn(size, device="cuda").to(dtype)
    for factor in FACTORS:
        result = scale(x, factor)
        torch.testing.assert_close(result, expected(x, factor), rtol=0, atol=0)
        out = torch.full_like(x, float("nan"))
        assert scale(x, factor, out) is out
        assert torch.equal(out, result)


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


def test_many_vectors(scale: Scale) -> None:
    """Catches: a fault of the unrolled kernel, which only big tensors reach; its last block is nearly empty."""
    for size in (8 * 256 * 1024, 8 * 256 * 1024 + 8 * 1024 + 5):
        x = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(scale(x, 0.3), expected(x, 0.3), rtol=0, atol=0)


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
    with pytest.raises(RuntimeError, match=r"scale.*CUDA"):
        scale(x.cpu(), 2.0)
    with pytest.raises(RuntimeError, match=r"scale.*out must be a CUDA tensor"):
        scale(x, 2.0, torch.empty(4, 6))
    with pytest.raises(RuntimeError, match=r"scale.*same shape"):
        scale(x, 2.0, torch.empty(4, 1, device="cuda"))
    with pytest.raises(RuntimeError, match=r"scale.*dtype float32"):
        scale(x, 2.0, torch.empty(4, 6, dtype=torch.float16, device="cuda"))
    with pytest.raises(RuntimeError, match=r"scale.*int32"):
        scale(x.int(), 2.0)
    with pytest.raises(RuntimeError, match=r"scale.*contiguous"):
        scale(x.t(), 2.0)
    with pytest.raises(RuntimeError, match=r"scale.*contiguous"):
        scale(x, 2.0, torch.empty(6, 4, device="cuda").t())


def test_more_than_2_31_elements(scale: Scale) -> None:
    """Catches: a 32-bit index. 4.3 GB of bf16 in place; the last block and one beyond 2**31 are looked at."""
    x = torch.full((2**31 + 4097,), 3.0, dtype=torch.bfloat16, device="cuda")
    scale(x, 2.0, x)
    assert bool((x[-5000:] == 6.0).all())
    assert bool((x[:5000] == 6.0).all())
