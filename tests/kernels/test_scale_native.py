"""`native/scale` against the product in float64, and what the row refuses."""

from __future__ import annotations

import pytest
import torch

from rapid_llm.kernels.ops.elementwise.scale import scale
from tests.kernels.devices import DEVICES, DTYPES

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

SIZES = [0, 1, 128, 1024, 4096, 4097, 65536]
FACTORS = [0.5, 1.0, 2.0, 0.3]


def expected(x: torch.Tensor, factor: float) -> torch.Tensor:
    """The product is exact in float64 (24 + 24 bits), then rounded to fp32 and to x's dtype, as the op promises."""
    exact = x.double() * torch.tensor(factor, dtype=torch.float32, device=x.device).double()
    return exact.float().to(x.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_values(device: str, dtype: torch.dtype, size: int) -> None:
    """Catches: a dropped tail, a factor rounded to the tensor's dtype (0.3), a product rounded twice."""
    x = torch.randn(size, device=device).to(dtype)
    for factor in FACTORS:
        torch.testing.assert_close(scale(x, factor), expected(x, factor), rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf"), 3e38, 1e-45])
def test_special_values(device: str, special: float) -> None:
    """Catches: a NaN swallowed, an overflow clamped, a subnormal flushed."""
    x = torch.tensor([special, -special, 1.0], device=device)
    for factor in (2.0, 0.0, float("inf"), float("nan"), 1e300):
        torch.testing.assert_close(scale(x, factor), expected(x, factor), rtol=0, atol=0, equal_nan=True)


VIEWS = {
    "transposed": lambda b: b[:4096].view(64, 64).t(),
    "every other": lambda b: b[:4096].view(64, 64)[:, ::2],
    "expanded": lambda b: b[:64].view(64, 1).expand(64, 5),
    "misaligned": lambda b: b[1:1000],
    "scalar": lambda b: b[3].view(()),
    "three dimensions": lambda b: b[:4096].view(16, 16, 16)[::2, 3:9, 1:].permute(2, 0, 1),
    "six that do not merge": lambda b: b[: 3**6].view(3, 3, 3, 3, 3, 3)[:, :2, :2, :2, :2, :2],
    "a hole": lambda b: b[:4096].view(16, 256)[:, :0],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("view", VIEWS)
def test_layouts(device: str, view: str) -> None:
    """Catches: a stride ignored, an offset lost, a result in the input's layout (fakes promise a contiguous one)."""
    x = VIEWS[view](torch.randn(5000, device=device))
    before = x.clone()
    result = scale(x, 0.3)
    torch.testing.assert_close(result, expected(x, 0.3), rtol=0, atol=0)
    assert result.is_contiguous()
    assert torch.equal(x, before)
    # Into a view of its own, with guard bands on both sides.
    buffer = torch.full((3 * 5000,), 7.0, device=device)
    out = VIEWS[view](buffer[5000:10000])
    if view == "expanded":
        with pytest.raises(RuntimeError, match=r"scale.*share memory"):
            scale(x, 0.3, out)
        return
    assert scale(x, 0.3, out) is out
    torch.testing.assert_close(out, expected(x, 0.3), rtol=0, atol=0)
    assert int((buffer != 7.0).sum()) <= out.numel()


@pytest.mark.parametrize("device", DEVICES)
def test_aliasing(device: str) -> None:
    """Catches: a partial overlap answered wrongly in silence; `out is input` refused."""
    buffer = torch.randn(1000, device=device)
    wanted = expected(buffer, 2.0)
    assert scale(buffer, 2.0, buffer) is buffer
    assert torch.equal(buffer, wanted)
    twin = buffer.view(1000)
    wanted = expected(buffer, 0.5)
    assert torch.equal(scale(buffer, 0.5, twin), wanted)
    with pytest.raises(RuntimeError, match=r"scale.*overlaps input in part"):
        scale(buffer[:-1], 2.0, buffer[1:])
    # Interleaved columns of one buffer share no element.
    grid = torch.randn(20, 50, device=device)
    wanted = expected(grid[:, :25], 2.0)
    assert torch.equal(scale(grid[:, :25], 2.0, grid[:, 25:]), wanted)


def test_refusals() -> None:
    """Catches: a wrong out resized, broadcast or cast in silence."""
    x = torch.ones(4, 6)
    with pytest.raises(RuntimeError, match=r"scale.*same shape"):
        scale(x, 2.0, torch.empty(4, 1))
    with pytest.raises(RuntimeError, match=r"scale.*dtype"):
        scale(x, 2.0, torch.empty(4, 6, dtype=torch.float16))
    with pytest.raises(RuntimeError, match=r"scale.*device"):
        scale(x, 2.0, torch.empty(4, 6, device="meta"))
    with pytest.raises(RuntimeError, match=r"scale.*int32"):
        scale(x.int(), 2.0)


@pytest.mark.gpu
def test_more_than_2_31_elements() -> None:
    """Catches: a 32-bit index. 4.3 GB of bf16 in place; the last block and one beyond 2**31 are looked at."""
    x = torch.full((2**31 + 4097,), 3.0, dtype=torch.bfloat16, device="cuda")
    scale(x, 2.0, x)
    assert bool((x[-5000:] == 6.0).all())
    assert bool((x[:5000] == 6.0).all())
