"""`native/embedding`: what the conformance suite does not say."""

from __future__ import annotations

import pytest
import torch

from rapid_llm.kernels.ops.embedding.embedding import _gather_known, embedding
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from tests.kernels.devices import DEVICES

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

GGML = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", GGML)
def test_blocks_as_gguf_reads_them(device: str, scheme: str) -> None:
    """Catches: swapped nibbles, a wrong zero point, signed bytes read as unsigned. The oracle is the gguf package."""
    gguf = pytest.importorskip("gguf", reason="the oracle is the gguf package")
    kind = gguf.GGMLQuantizationType[GGML[scheme]]
    table = gguf.quants.quantize(torch.randn(11, 96).numpy(), kind)
    wanted = torch.from_numpy(gguf.quants.dequantize(table, kind))
    ids = torch.tensor([[10, 0], [3, 3]])
    result = embedding(ids.to(device), torch.from_numpy(table).to(device), scheme=scheme)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.cpu(), wanted[ids], rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", ["unquantized", *GGML])
@pytest.mark.parametrize("bad", [-1, 5])
def test_id_outside(device: str, scheme: str, bad: int) -> None:
    """Catches: a read beyond the table. The CPU raises; CUDA, which cannot, gives a row of zeros."""
    widths = {"unquantized": 32, "q8_0": 34, "q4_0": 18, "q4_1": 20}
    dtype = torch.float32 if scheme == "unquantized" else torch.uint8
    weight = torch.full((5, widths[scheme]), 1, dtype=dtype, device=device)
    ids = torch.tensor([1, bad], device=device)
    if device == "cpu" and not INTERPRETED:
        with pytest.raises(IndexError):
            embedding(ids, weight, scheme=scheme)
        return
    result = embedding(ids, weight, scheme=scheme)
    assert bool((result[0] != 0).any())
    assert bool((result[1] == 0).all())


def test_cuda_without_triton() -> None:
    """Catches: the gather that CUDA takes without Triton clamping an id instead of giving zeros. Run on the CPU."""
    weight = torch.arange(1.0, 13).view(4, 3)
    ids = torch.tensor([[3, -1], [4, 0]])
    result = _gather_known(ids, weight)
    assert torch.equal(result, torch.tensor([[[10.0, 11, 12], [0, 0, 0]], [[0, 0, 0], [1, 2, 3]]]))
    assert _gather_known(ids, weight[:0]).shape == (2, 2, 3)


def test_refusals() -> None:
    """Catches: float ids truncated, a quantised table read as dense or the reverse, an `out` inside the table."""
    ids, weight = torch.zeros(2, dtype=torch.int64), torch.zeros(4, 64)
    with pytest.raises(RuntimeError, match=r"embedding.*int32 or int64.*float32"):
        embedding(ids.float(), weight)
    with pytest.raises(RuntimeError, match=r"embedding.*q4_0.*float32"):
        embedding(ids, weight, scheme="q4_0")
    with pytest.raises(RuntimeError, match=r"embedding.*unquantized.*uint8"):
        embedding(ids, weight.byte())
    with pytest.raises(RuntimeError, match=r"embedding.*q4_9"):
        embedding(ids, weight.byte(), scheme="q4_9")
    with pytest.raises(ValueError, match=r"q8_0.*33 bytes"):
        embedding(ids, torch.zeros(4, 33, dtype=torch.uint8), scheme="q8_0")
    with pytest.raises(RuntimeError, match=r"embedding.*overlaps weight"):
        embedding(ids, weight, weight[1:3])
    with pytest.raises(RuntimeError, match=r"embedding.*same shape"):
        embedding(ids, weight, torch.empty(2, 63))
