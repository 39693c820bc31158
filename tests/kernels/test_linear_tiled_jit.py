"""`jit/linear.<scheme>`: the order of its records, and what the conformance suite does not say of the kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import dispatch, jit, registry
from rapid_llm.kernels.ops.gemm.linear_tiled_jit import TiledWeight, linear, pack
from rapid_llm.verify.formats import random_blocks
from rapid_llm.verify.oracles import linear as oracle

SCHEMES = ("q8_0", "q4_0", "q4_1")
DTYPES = [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")]


@pytest.fixture(scope="module")
def built() -> None:
    """Builds once, so that a broken toolchain fails first and with its log; skips where the path is absent."""
    if not (probe := jit.why_not()).ok:
        pytest.skip(f"jit: {probe.text}")
    jit.load_jit("linear_tiled", "gemm/linear_tiled.cu")


def _blocks(rows: int, features: int, scheme: str) -> Tensor:
    return random_blocks(torch.Generator().manual_seed(rows), rows, features, scheme)


def _dense(weight: Tensor, scheme: str) -> Tensor:
    """The weight in float64, by the oracle: a product with the identity."""
    features = weight.shape[1] // {"q8_0": 34, "q4_0": 18, "q4_1": 20}[scheme] * 32
    return oracle(input=torch.eye(features), weight=weight, scheme=scheme).t()


def _lane_codes(words: np.ndarray, block: int, scheme: str) -> list[int]:
    """8 codes of a block as the kernel takes them out of a lane's 4 words: pairs at bits 0 and 16 of a shifted word."""
    codes = []
    for i in range(4):
        if scheme == "q8_0":
            word = int(words[2 * block + i // 2]) >> (i % 2 * 8)
            codes += [int(np.uint8(word >> shift & 255).astype(np.int8)) for shift in (0, 16)]
        else:
            word = int(words[block]) >> (4 * i)
            codes += [(word >> shift & 15) - (8 if scheme == "q4_0" else 0) for shift in (0, 16)]
    return codes


def _read_records(weight: TiledWeight, scheme: str) -> np.ndarray:
    """The dense weight out of records, filled-up outputs and features included."""
    records = weight.records.numpy()
    tiles, groups, _ = records.shape
    group = 2 if scheme == "q8_0" else 4
    dense = np.zeros((tiles * 8, groups * group * 32))
    for tile, at, lane in np.ndindex(tiles, groups, 32):
        words = records[tile, at, lane * 16 : lane * 16 + 16].view(np.uint32)
        row, quarter = divmod(lane, 4)
        scales = records[tile, at, 512:].view(np.float16).reshape(4, -1, group, 2)[row // 2, :, :, row % 2]
        for block in range(group):
            least = scales[1, block] if scheme == "q4_1" else 0.0
            first = (at * group + block) * 32 + quarter * 8
            codes = np.array(_lane_codes(words, block, scheme), dtype=np.float64)
            dense[tile * 8 + row, first : first + 8] = np.float64(scales[0, block]) * codes + np.float64(least)
    return dense


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("rows", "features"), [(1, 32), (16, 128), (21, 288)])
def test_records(scheme: str, rows: int, features: int) -> None:
    """Catches: a code, scale or minimum where the kernel looks for another, a filled-up place that is not zero."""
    weight = _blocks(rows, features, scheme)
    packed = pack(weight, scheme)
    dense = _read_records(packed, scheme)
    assert np.array_equal(dense[:rows, :features], _dense(weight, scheme).numpy())
    assert not dense[rows:].any()
    assert not dense[:, features:].any()
    assert packed.nbytes == packed.records.numel()


def test_records_of_nothing() -> None:
    """Catches: a weight without outputs or features that cannot be held."""
    for scheme, size in (("q8_0", 34), ("q4_0", 18), ("q4_1", 20)):
        for rows, blocks in ((0, 2), (3, 0)):
            assert pack(torch.zeros(rows, blocks * size, dtype=torch.uint8), scheme).nbytes == 0


def test_records_hold_no_more_than_blocks() -> None:
    """Catches: codes widened, or scales stored in fp32."""
    for scheme in SCHEMES:
        weight = _blocks(64, 512, scheme)
        assert pack(weight, scheme).nbytes == weight.nbytes


def test_refuses_cpu_tensors() -> None:
    """Catches: host memory handed to a kernel, or a compile started for it."""
    with pytest.raises(RuntimeError, match=r"linear.*CUDA"):
        linear(torch.zeros(1, 32).half(), pack(_blocks(8, 32, "q8_0"), "q8_0"), scheme="q8_0")


def test_rows_are_bound_with_their_own_form() -> None:
    """Catches: a row that would be given GGUF's own blocks."""
    for scheme in SCHEMES:
        row = registry.get_row(f"jit/linear.{scheme}")
        assert (row.schemes, row.dtypes) == ((scheme,), ("bf16", "fp16"))
        assert row.prepack is not None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("outputs", "features"), [(1, 32), (33, 96), (264, 576), (1000, 4096), (4096, 1536)])
def test_values(built: None, dtype: torch.dtype, scheme: str, outputs: int, features: int) -> None:
    """Catches: wrong operands, a group lost by a warp, outputs past the last; rows that depend on each other."""
    weight = _blocks(outputs, features, scheme)
    generator = torch.Generator().manual_seed(features)
    x, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((8, features), (outputs,)))
    dense = _dense(weight, scheme)
    exact = x.double() @ dense.t() + bias.double()
    total = x.double().abs() @ dense.abs().t() + bias.double().abs()
    total += x.double().abs().sum(1, keepdim=True) * 15 * (dense.abs().max() if scheme == "q4_1" else 0)
    bound = exact.abs() * torch.finfo(dtype).eps + total * (2 * features + 1) * 2.0**-23 + 1e-7
    packed = pack(weight.cuda(), scheme)
    together = linear(x.cuda(), packed, bias.cuda(), scheme=scheme)
    assert ((together.cpu().double() - exact).abs() <= bound).all()
    for rows in (1, 3):
        out = torch.full((rows, outputs), torch.nan, device="cuda", dtype=dtype)
        assert linear(x[:rows].cuda(), packed, bias.cuda(), out, scheme=scheme) is out
        assert torch.equal(out, together[:rows])


@pytest.mark.gpu
def test_refusals(built: None) -> None:
    """Catches: records of another shape or scheme, rows that 16-byte loads would fault on."""
    x, packed = torch.zeros(2, 64, device="cuda", dtype=torch.float16), pack(_blocks(8, 64, "q8_0").cuda(), "q8_0")
    with pytest.raises(RuntimeError, match=r"linear.*records.*same shape"):
        linear(x, packed, scheme="q4_0")
    with pytest.raises(RuntimeError, match=r"linear.*records.*same shape"):
        linear(torch.cat((x, x, x), 1), packed, scheme="q8_0")
    with pytest.raises(RuntimeError, match=r"linear.*16 bytes"):
        linear(torch.zeros(2, 72, device="cuda", dtype=torch.float16)[:, 1:65], packed, scheme="q8_0")
    with pytest.raises(RuntimeError, match=r"linear.*up to 8 rows"):
        linear(x.repeat(5, 1), packed, scheme="q8_0")


@pytest.mark.gpu
def test_captured_and_replayed(built: None) -> None:
    """Catches: host work per call, a stream of its own, an input or result touched before its turn."""
    packed = pack(_blocks(512, 512, "q4_0").cuda(), "q4_0")
    x = torch.randn(2, 512, device="cuda").bfloat16()
    linear(x, packed, scheme="q4_0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(linear(x, packed, scheme="q4_0"), packed, scheme="q4_0")
    for _ in range(2):
        x.copy_(torch.randn(2, 512))
        graph.replay()
        assert torch.equal(y, linear(linear(x, packed, scheme="q4_0"), packed, scheme="q4_0"))


@pytest.mark.gpu
def test_bound_by_name(built: None) -> None:
    """Catches: a row that cannot be reached by name, or whose prepack is not run."""
    x, weight = torch.randn(1, 64, device="cuda").bfloat16(), _blocks(8, 64, "q4_1").cuda()
    handle = dispatch("linear", x, weight, scheme="q4_1", backend="jit/linear.q4_1", prepack=True)
    expected = linear(x, pack(weight, "q4_1"), scheme="q4_1")
    assert torch.equal(handle(x, handle.prepack(weight), scheme="q4_1"), expected)
