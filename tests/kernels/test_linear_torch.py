"""`torch/linear.*`: rows of `linear` for the CPU from torch's own operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from rapid_llm.kernels import dispatch, registry
from rapid_llm.kernels.ops.block_formats import BLOCK_BYTES
from rapid_llm.kernels.ops.gemm import linear_rowwise, linear_torch
from rapid_llm.kernels.ops.gemm.dequantise import dequantise
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from rapid_llm.kernels.registry import KernelSpec, probes
from rapid_llm.verify.conformance import check_callable
from rapid_llm.verify.formats import random_blocks

pytestmark = pytest.mark.skipif(INTERPRETED, reason="no Triton in these rows")

SCHEMES = tuple(BLOCK_BYTES)
BF16_ROWS = [r for r in registry.rows("linear") if r.backend == "torch" and "weight:bf16" in r.roundings]

needs_fbgemm = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this torch has no FBGEMM for this CPU"
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Cases are small: one thread is faster, and does not fight other processes for the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _blocks(rows: int, features: int, scheme: str) -> torch.Tensor:
    return random_blocks(torch.Generator().manual_seed(rows), rows, features, scheme)


@needs_fbgemm
@pytest.mark.parametrize("row", BF16_ROWS, ids=lambda row: row.name)
def test_bf16_rows_without_the_hardware(row: KernelSpec) -> None:
    """Catches: wrong values or undeclared roundings in rows that the conformance suite skips where bf16 is slow."""
    anywhere = dataclasses.replace(row, available="rapid_llm.kernels.ops.gemm.linear_rowwise:available")
    fn, op = registry.load_target(row.name), registry.get_op("linear")
    report = check_callable(op, fn, dtype="fp32", scheme=row.schemes[0], seeds=(0,), row=anywhere)
    assert report.ok, report


@needs_fbgemm
@pytest.mark.parametrize("scheme", SCHEMES)
def test_unpacking_is_exact(scheme: str) -> None:
    """Catches: nibbles in GGUF's order, a bias rounded to fp16, any second rounding."""
    weight = _blocks(37, 160, scheme)
    packed = linear_rowwise.pack_blocks(weight, scheme)
    assert packed.numel() == 37 * 5 * (40 if scheme == "q8_0" else 20)
    assert torch.equal(linear_rowwise._unpack(packed), dequantise(weight, scheme))


@needs_fbgemm
def test_unpacking_a_scale_whose_shift_leaves_fp16() -> None:
    """Catches: 8 d = inf, which makes every weight of the block a NaN."""
    weight = _blocks(3, 64, "q4_0")
    weight[1, :2] = torch.tensor([60000.0], dtype=torch.float16).view(torch.uint8)
    packed = linear_rowwise.pack_blocks(weight, "q4_0")
    assert torch.equal(linear_rowwise._unpack(packed), dequantise(weight, "q4_0"))


@needs_fbgemm
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bag_errs_like_a_dense_product(scheme: str) -> None:
    """Catches: a bag row that is within the worst case, but adds an error of its own (a centre left out, say)."""
    weight, x = _blocks(480, 576, scheme), torch.randn(1, 576)
    dense = dequantise(weight, scheme)
    exact = x.double() @ dense.double().t()
    result = linear_rowwise.linear_bag(x, linear_rowwise.pack_bags(weight, scheme), scheme=scheme)
    plain = torch.nn.functional.linear(x, dense)
    assert (result - exact).square().mean() <= 4 * (plain - exact).square().mean()


@needs_fbgemm
def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a whole weight unpacked at once, a piece lost, doubled or shifted against its bias."""
    made: list[int] = []
    unpack = linear_rowwise._unpack

    def counted(weight: torch.Tensor) -> torch.Tensor:
        dense = unpack(weight)
        made.append(dense.numel())
        return dense

    monkeypatch.setattr(linear_rowwise, "_unpack", counted)
    monkeypatch.setattr(linear_rowwise, "PIECE", 256)
    weight, x, bias = _blocks(33, 64, "q4_1"), torch.randn(2, 3, 64), torch.randn(33)
    packed = linear_rowwise.pack_blocks(weight, "q4_1")
    whole = torch.nn.functional.linear(x, dequantise(weight, "q4_1"))
    torch.testing.assert_close(linear_rowwise.linear_unpack(x, packed, bias, scheme="q4_1"), whole + bias)
    product = linear_rowwise.linear_unpack_bf16(x, packed, scheme="q4_1")
    torch.testing.assert_close(product, whole, rtol=0.03, atol=0.1)
    assert len(made) == 18
    assert max(made) == 256


def test_gemv_passes_a_transpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: the input handed to the batched product with strides (1, 1), which is 5 times slower and looks alike."""
    seen: list[tuple[int, ...]] = []
    bmm = torch.bmm

    def watched(weight: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        seen.append((*columns.shape, *columns.stride()))
        assert weight.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()
        return bmm(weight, columns)

    monkeypatch.setattr(torch, "bmm", watched)
    matrix = torch.randn(96, 64)
    for x in (torch.randn(1, 64), torch.randn(64), torch.randn(3, 128)[:, ::2]):
        result = linear_torch.linear_gemv(x, matrix)
        torch.testing.assert_close(result, x @ matrix.t())
    assert seen == [(8, 64, 1, 0, 1, 64), (8, 64, 1, 0, 1, 64), (8, 64, 3, 0, 1, 64)]


@needs_fbgemm
def test_memory_that_rows_hold() -> None:
    """Catches: a form that grew, or that tells the wrong size to a report of memory."""
    weight, count = _blocks(192, 576, "q4_1"), 192 * 576
    bags = linear_rowwise.pack_bags(weight, "q4_1")
    assert bags.nbytes == sum(t.untyped_storage().nbytes() for t in (bags.table, bags.scale, bags.offset))
    assert bags.nbytes <= 1.34 * count
    assert bags.index is linear_rowwise.pack_bags(_blocks(192, 576, "q8_0"), "q8_0").index
    assert linear_rowwise.pack_blocks(weight, "q4_1").nbytes == weight.nbytes
    assert linear_torch.pack_fp16(weight, "q4_1").nbytes == 2 * count
    assert linear_torch.pack_dense(weight, "q4_1").nbytes == 4 * count


@needs_fbgemm
def test_fp16_refuses_what_it_cannot_hold(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: FBGEMM's silent saturation at 65504."""
    weight, x = torch.randn(16, 32), torch.randn(2, 32)
    weight[3, 5] = 70000.0
    packed = linear_torch.pack_fp16(weight, "unquantized")
    assert "beyond fp16" in caplog.text
    assert packed.nbytes == weight.nbytes
    torch.testing.assert_close(linear_torch.linear_fp16(x, packed), x @ weight.t())


@needs_fbgemm
def test_a_wrong_operator_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a torch whose embedding operators lay out rows otherwise, taken on trust."""
    assert linear_rowwise.available() is True
    monkeypatch.setattr(linear_rowwise, "_bags", lambda *_: torch.tensor([[4.0]]))
    assert "[[4.0]] for [[3.0]]" in str(linear_rowwise.available())


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which C++ rows cannot be built."""
    monkeypatch.setenv("RAPID_LLM_JIT", "off")
    probes.forget()
    yield
    probes.forget()


@needs_fbgemm
@pytest.mark.parametrize(
    ("scheme", "tokens", "allow", "row"),
    [
        ("q4_1", 1, (), "torch/linear.q4_1_bag"),
        ("q4_1", 8, (), "torch/linear.q4_1_bag"),
        ("q4_1", 9, (), "torch/linear.q4_1_unpack"),
        ("q4_1", 512, (), "torch/linear.q4_1_unpack"),
        ("q8_0", 1, ("weight:fp16",), "torch/linear.q8_0_bag"),
        ("q8_0", 8, ("weight:fp16",), "torch/linear.q8_0_unpack"),
        ("unquantized", 1, (), "torch/linear.gemv"),
        ("unquantized", 64, (), "native/linear"),
    ],
)
def test_choice(no_compiler: None, scheme: str, tokens: int, allow: tuple[str, ...], row: str) -> None:
    """Catches: a preference or rank that gives a token count to a slower row."""
    if row.endswith("gemv") and linear_torch.available_gemv() is not True:
        pytest.skip("this torch has no MKL")
    dims = {"tokens": tokens, "in_features": 576, "out_features": 960}
    chosen = dispatch("linear", device="cpu", dtype="fp32", scheme=scheme, dims=dims, allow=allow, prepack=True)
    assert chosen.spec.name == row, chosen.explain()


@needs_fbgemm
def test_refusals() -> None:
    """Catches: another width read as this one, and a result broadcast into an `out` that is too large."""
    weight = _blocks(16, 64, "q4_1")
    packed = [
        (linear_rowwise.linear_bag, linear_rowwise.pack_bags(weight, "q4_1")),
        (linear_rowwise.linear_unpack, linear_rowwise.pack_blocks(weight, "q4_1")),
        (linear_torch.linear_fp16, linear_torch.pack_fp16(weight, "q4_1")),
        (linear_torch.linear_gemv, linear_torch.pack_dense(weight, "q4_1")),
    ]
    for fn, form in packed:
        with pytest.raises(RuntimeError, match=r"linear.*64 features.*\(2, 32\)"):
            fn(torch.zeros(2, 32), form, scheme="q4_1")
        with pytest.raises(RuntimeError, match=r"linear.*float32.*float16"):
            fn(torch.zeros(2, 64).half(), form, scheme="q4_1")
        with pytest.raises(RuntimeError, match=r"linear.*bias.*same shape"):
            fn(torch.zeros(2, 64), form, torch.zeros(1), scheme="q4_1")
        with pytest.raises(RuntimeError, match=r"linear.*out.*same shape"):
            fn(torch.zeros(1, 64), form, None, torch.zeros(4, 16), scheme="q4_1")


@needs_fbgemm
@pytest.mark.parametrize("scheme", ["unquantized", "q8_0", "q4_1"])
def test_a_weight_that_is_not_there_is_refused(scheme: str) -> None:
    """Catches: garbage without an error. The batched product and FBGEMM's operators take a weight that was left on the
    meta device, and answer with whatever their memory held."""
    weight = torch.randn(16, 64) if scheme == "unquantized" else _blocks(16, 64, scheme)
    forms = [(linear_torch.linear_gemv, linear_torch.pack_dense(weight, scheme))]
    if scheme != "unquantized":
        packed = linear_rowwise.pack_blocks(weight, scheme)
        forms += [(linear_rowwise.linear_unpack, packed), (linear_rowwise.linear_unpack_bf16, packed)]
    for fn, form in forms:
        for wrong in (form.to("meta"), form[0], form[None], form.view(-1), form.to(torch.float64)):
            with pytest.raises(RuntimeError, match=r"linear: .*same device"):
                fn(torch.ones(2, 64), wrong, scheme=scheme)


def test_no_outputs_are_an_empty_result() -> None:
    """Catches: an error of `unflatten` for a weight of no rows."""
    assert linear_torch.linear_gemv(torch.ones(2, 64), torch.ones(0, 64)).shape == (2, 0)


@needs_fbgemm
@pytest.mark.parametrize("count", [1, 3])
def test_a_lazy_negation_is_not_lost(count: int) -> None:
    """Catches: an operator that reads memory where the sign is only promised."""
    weight = _blocks(16, 64, "q8_0")
    x = torch.randn(count, 64)
    negated = torch._neg_view(x.clone())
    for fn, form in [
        (linear_rowwise.linear_bag, linear_rowwise.pack_bags(weight, "q8_0")),
        (linear_rowwise.linear_unpack, linear_rowwise.pack_blocks(weight, "q8_0")),
        (linear_torch.linear_fp16, linear_torch.pack_fp16(weight, "q8_0")),
        (linear_torch.linear_gemv, linear_torch.pack_dense(weight, "q8_0")),
    ]:
        torch.testing.assert_close(fn(negated, form, scheme="q8_0"), fn(-x, form, scheme="q8_0"))
