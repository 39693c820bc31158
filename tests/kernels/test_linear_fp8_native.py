"""`native/linear.fp8_block128`: what the conformance suite does not say."""

from __future__ import annotations

import pytest
import torch

from rapid_llm.kernels.ops.block_formats import FP8, row_bytes, row_elements
from rapid_llm.kernels.ops.gemm.fp8_block128 import codes_of, dequantise, pack, scales_of
from rapid_llm.kernels.ops.gemm.linear import linear
from rapid_llm.kernels.registry import ArgumentError
from rapid_llm.verify import formats
from tests.kernels.devices import DEVICES

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("device", DEVICES)
def test_every_code(device: str, rows: int) -> None:
    """Catches: a subnormal flushed or doubled, a sign lost, an exponent one off; the judge is torch's own fp8."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127].view(2, 127)
    weight = torch.zeros(127, 128, dtype=torch.uint8)
    weight[:, 3], weight[:, 90] = codes[0], codes[1]
    packed = pack(weight.view(torch.float8_e4m3fn), torch.tensor([[0.25]]))
    x = torch.zeros(rows, 128)
    x[:, 3] = 1.0
    other = torch.zeros(rows, 128)
    other[:, 90] = 2.0
    for chosen, factor, column in ((x, 0.25, 0), (other, 0.5, 1)):
        got = linear(chosen.to(device), packed.to(device), scheme=FP8).cpu()
        want = codes[column].view(torch.float8_e4m3fn).float() * factor
        assert torch.equal(got, want.expand(rows, -1))


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("code", [127, 255])
@pytest.mark.parametrize("device", DEVICES)
def test_nan(device: str, code: int, rows: int) -> None:
    """Catches: NaN decoded as 480, as the bits alone would say."""
    weight = torch.zeros(3, 128, dtype=torch.uint8)
    weight[1, 5] = code
    packed = pack(weight.view(torch.float8_e4m3fn), torch.ones(1, 1))
    got = linear(torch.ones(rows, 128, device=device), packed.to(device), scheme=FP8)
    assert got.isnan().cpu().tolist() == [[False, True, False]] * rows


@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_may_have_scales_of_their_own(device: str, rows: int) -> None:
    """Catches: one scale read for a whole block: rows that were cut from two weights and fused share none."""
    scales = (torch.tensor([[0.5, 2.0]]), torch.tensor([[4.0, 0.25]]))
    codes = [torch.randint(-8, 9, (n, 256)).float().to(torch.float8_e4m3fn) for n in (5, 40)]
    parts = [pack(code, scale) for code, scale in zip(codes, scales, strict=True)]
    x = torch.randint(-9, 10, (rows, 256)).float()  # exact in fp32 in any order
    want = torch.cat([x.double() @ dequantise(part).double().T for part in parts], 1)
    got = linear(x.to(device), torch.cat(parts).to(device), scheme=FP8).cpu()
    assert torch.equal(got.double(), want)


def test_packing() -> None:
    """Catches: scales of the wrong block, a row that does not start on 16 bytes, a width that does not come back."""
    codes, scales = torch.randn(200, 640).to(torch.float8_e4m3fn), torch.rand(2, 5)
    packed = pack(codes, scales)
    assert packed.shape == (200, 640 + 32)
    assert torch.equal(codes_of(packed).float(), codes.float())
    assert torch.equal(scales_of(packed), scales.repeat_interleave(128, 0)[:200])
    want = codes.double() * scales.double().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    assert torch.equal(formats.dequantise(packed, FP8), want)
    assert torch.equal(dequantise(packed), want.float())
    assert torch.equal(dequantise(torch.stack((packed, packed), 2)[:, :, 1]), want.float())


def test_row_sizes() -> None:
    """Catches: a number of bytes that two widths share, or that none has and is taken."""
    known = {row_bytes(columns, FP8): columns for columns in range(0, 9000, 128)}
    assert all(size % 16 == 0 for size in known)
    for size in range(9000):
        if size in known:
            assert row_elements(size, FP8) == known[size]
        else:
            with pytest.raises(ValueError, match=f"a row of {size} bytes"):
                row_elements(size, FP8)


def test_what_does_not_fit_is_refused() -> None:
    """Catches: a checkpoint's tensors of other shapes packed into nonsense, a width computed in part."""
    codes = torch.zeros(130, 256).to(torch.float8_e4m3fn)
    with pytest.raises(ArgumentError, match=r"take scales of shape \(2, 2\)"):
        pack(codes, torch.ones(1, 2))
    with pytest.raises(ArgumentError, match="float8_e4m3fn in rows of a multiple of 128"):
        pack(codes[:, :200], torch.ones(2, 2))
    with pytest.raises(ArgumentError, match="float8_e4m3fn"):
        pack(codes.float(), torch.ones(2, 2))
    packed = pack(codes, torch.ones(2, 2))
    with pytest.raises(ArgumentError, match="a row of 200 weights does not divide into blocks of 128"):
        linear(torch.ones(1, 200), packed, scheme=FP8)
    with pytest.raises(ArgumentError, match="takes weight rows of 144"):
        linear(torch.ones(1, 128), packed, scheme=FP8)
