"""GGUF's block formats dequantised, bit for bit as the `gguf` package does it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rapid_llm.kernels.ops.block_formats import FORMATS, row_bytes, row_elements
from rapid_llm.kernels.ops.embedding.embedding import embedding
from rapid_llm.kernels.ops.gemm.dequantise import dequantise
from rapid_llm.kernels.ops.gemm.linear import linear
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from rapid_llm.kernels.registry import ArgumentError
from rapid_llm.verify import formats
from tests.kernels.devices import DEVICES

gguf = pytest.importorskip("gguf", reason="the oracle is the gguf package")

pytestmark = pytest.mark.skipif(INTERPRETED, reason="PyTorch's path; the interpreter has nothing to run")

SCHEMES = [scheme for scheme in FORMATS if scheme.upper() in gguf.GGMLQuantizationType.__members__]


def _blocks(scheme: str, rows: int, blocks: int) -> np.ndarray:
    """Every bit at random, scales of every kind, infinities and NaN among them."""
    return np.random.default_rng(rows).integers(0, 256, (rows, blocks * FORMATS[scheme].block), dtype=np.uint8)


def _as_gguf(raw: np.ndarray, scheme: str) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[scheme.upper()]))


def _equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit, signs of zeros too; a NaN is a NaN."""
    same = (got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())
    return bool(same.all())


def test_every_scheme_of_gguf_is_here() -> None:
    """Catches: a format that files have, dropped from the table, and with it from every test below."""
    named = {"q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl"}
    assert set(SCHEMES) == named


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_blocks_bit_for_bit(scheme: str, device: str) -> None:
    """Catches: a field read from other bits, a scale without its top bits or its sign, a minimum added, an order of
    weights of another format, an operation that rounds twice."""
    raw = _blocks(scheme, 40, 3)
    got = dequantise(torch.from_numpy(raw).to(device), scheme)
    assert got.shape == (40, 3 * FORMATS[scheme].weights)
    assert _equal(got.cpu(), _as_gguf(raw, scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_blocks_at_odd_addresses_and_strides(scheme: str) -> None:
    """Catches: fp16 scales read through a view, which fails or lies where a block starts at an odd byte."""
    raw = torch.from_numpy(_blocks(scheme, 9, 2))
    odd = torch.zeros(9, raw.shape[1] + 3, dtype=torch.uint8)[:, 1:-2].copy_(raw)
    stepped = torch.stack((raw, raw), 2)[:, :, 1]
    assert _equal(dequantise(odd, scheme), dequantise(raw, scheme))
    assert _equal(dequantise(stepped, scheme), dequantise(raw, scheme))
    assert dequantise(raw[:0], scheme).shape == (0, 2 * FORMATS[scheme].weights)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_verifiers_oracle_reads_the_same(scheme: str) -> None:
    """Catches: an oracle that shares a misreading with the rows that it judges. float64 is within one fp32 rounding."""
    blocks = formats.random_blocks(torch.Generator().manual_seed(3), 6, 512, scheme)
    exact, want = formats.dequantise(blocks, scheme), _as_gguf(blocks.numpy(), scheme)
    assert bool(((exact - want.double()).abs() <= exact.abs() * 2.0**-24).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", ["q5_1", "q4_k", "q6_k"])
def test_ops_multiply_and_look_up_what_gguf_reads(scheme: str, device: str) -> None:
    """Catches: an op that hands a scheme to another format's decoder, pieces out of order, a bias at another piece."""
    weight = formats.random_blocks(torch.Generator().manual_seed(4), 37, 512, scheme)
    dense = _as_gguf(weight.numpy(), scheme).double()
    x, bias = torch.randn(5, 512), torch.randn(37)
    got = linear(x.to(device), weight.to(device), bias.to(device), scheme=scheme).cpu()
    want = x.double() @ dense.T + bias.double()
    bound = 515 * 2.0**-24 * (x.double().abs() @ dense.abs().T + bias.double().abs())
    assert bool(((got - want).abs() <= bound).all())
    rows = embedding(torch.tensor([36, 0, 5], device=device), weight.to(device), scheme=scheme)
    assert torch.equal(rows.cpu().double(), dense[[36, 0, 5]])


@pytest.mark.parametrize("scheme", FORMATS)
def test_row_sizes(scheme: str) -> None:
    """Catches: a number of bytes that two widths share, or that no width has and that is taken."""
    form = FORMATS[scheme]
    known = {row_bytes(n * form.weights, scheme): n * form.weights for n in range(12)}
    assert len(known) == 12
    for size in range(max(known) + 1):
        if size in known:
            assert row_elements(size, scheme) == known[size]
        else:
            with pytest.raises(ValueError, match=f"{scheme}: a row of {size} bytes"):
                row_elements(size, scheme)


def test_what_does_not_fill_blocks_is_refused() -> None:
    """Catches: an input of a width that super-blocks do not divide, computed in part."""
    with pytest.raises(ArgumentError, match="q4_k: a row of 128 weights does not divide into blocks of 256"):
        linear(torch.ones(1, 128), torch.zeros(3, 144, dtype=torch.uint8), scheme="q4_k")
    with pytest.raises(ArgumentError, match="takes weight rows of 288"):
        linear(torch.ones(1, 512), torch.zeros(3, 144, dtype=torch.uint8), scheme="q4_k")
