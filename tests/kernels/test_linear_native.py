"""`native/linear`: what the conformance suite does not say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rapid_llm.kernels.ops.gemm import dequantise as blocks
from rapid_llm.kernels.ops.gemm.linear import linear
from rapid_llm.kernels.ops.gemm.precision import exact_linear
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from rapid_llm.verify.formats import random_blocks
from tests.kernels.devices import DEVICES

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

GGML = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Cases are small: one thread is faster, and does not fight other processes for the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _blocks(rows: int, features: int, scheme: str) -> torch.Tensor:
    return random_blocks(torch.Generator().manual_seed(rows), rows, features, scheme)


@pytest.mark.parametrize("rows", [1, 6, 70])
@pytest.mark.parametrize("scheme", GGML)
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_as_gguf_reads_them(device: str, scheme: str, rows: int) -> None:
    """Catches: swapped nibbles, a wrong zero point, signed bytes read as unsigned. The oracle is the gguf package."""
    gguf = pytest.importorskip("gguf", reason="the oracle is the gguf package")
    kind = gguf.GGMLQuantizationType[GGML[scheme]]
    stored = gguf.quants.quantize(torch.randn(11, 96).numpy(), kind)
    dense = torch.from_numpy(gguf.quants.dequantize(stored, kind))
    x = torch.randn(rows, 96)
    result = linear(x.to(device), torch.from_numpy(stored).to(device), scheme=scheme)
    torch.testing.assert_close(result.cpu(), x @ dense.t(), rtol=1e-5, atol=1e-5)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Scratch for 256 weights; the sizes of the pieces that were dequantised."""
    made: list[int] = []
    dequantise = blocks.dequantise

    def counted(weight: torch.Tensor, scheme: str) -> torch.Tensor:
        dense = dequantise(weight, scheme)
        made.append(dense.numel())
        return dense

    monkeypatch.setattr(blocks, "dequantise", counted)
    monkeypatch.setattr(blocks, "PIECE", 256)
    return made


@pytest.mark.skipif(INTERPRETED, reason="Triton makes no dense copy at all")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scratch_is_bounded(small_pieces: list[int], dtype: torch.dtype) -> None:
    """Catches: a whole weight dequantised at once, a piece lost or doubled, a bias shifted against its piece."""
    x, bias = torch.randn(2, 3, 64).to(dtype), torch.randn(33).to(dtype)
    weight = _blocks(33, 64, "q4_1")
    result = linear(x, weight, bias, scheme="q4_1")
    assert len(small_pieces) == 9
    assert max(small_pieces) == 256
    whole = torch.nn.functional.linear(x.float(), blocks.dequantise(weight, "q4_1"), bias.float())
    torch.testing.assert_close(result, whole.to(dtype))


def test_fp32_is_not_rounded_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: TF32 or bf16 products of fp32 operands where the user lets torch make them."""
    x, weight, bias = torch.randn(7, 300), torch.randn(5, 300), torch.randn(5)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).float()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        result = exact_linear(x, weight, bias)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(result, exact)
    assert not torch.equal(exact_linear(x, weight, bias), exact)  # so the setting is what made the difference


def test_refusals() -> None:
    """Catches: a broadcast bias or out, a weight of another dtype or width, an out that shares the input's memory."""
    x, weight = torch.zeros(2, 64), torch.zeros(5, 64)
    quantised = torch.zeros(5, 40, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"linear.*same shape.*rows of 64.*\(5, 32\)"):
        linear(x, weight[:, :32])
    with pytest.raises(RuntimeError, match=r"linear.*float32.*float16"):
        linear(x, weight.half())
    with pytest.raises(RuntimeError, match=r"linear.*bias.*same shape"):
        linear(x, weight, torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"linear.*out.*same shape"):
        linear(x, weight, None, torch.empty(3, 5))
    with pytest.raises(RuntimeError, match=r"linear.*out.*overlaps input"):
        linear(x, weight, None, x.view(-1)[:10].view(2, 5))
    with pytest.raises(RuntimeError, match=r"linear.*share memory"):
        linear(x, weight, None, torch.empty(1, 5).expand(2, 5))
    with pytest.raises(RuntimeError, match=r"linear.*q4_9.*known"):
        linear(x, quantised, scheme="q4_9")
    with pytest.raises(RuntimeError, match=r"linear.*uint8.*float32"):
        linear(x, weight, scheme="q4_1")
    with pytest.raises(RuntimeError, match=r"linear.*rows of 40.*\(5, 36\)"):
        linear(x, quantised[:, :36], scheme="q4_1")
    with pytest.raises(RuntimeError, match=r"linear.*33.*32"):
        linear(torch.zeros(2, 33), quantised, scheme="q4_1")
    with pytest.raises(RuntimeError, match=r"linear.*two dimensions"):
        linear(x, weight[0])
