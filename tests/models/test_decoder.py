"""The decoder against the slow one: families, formats, chunks, ragged batches, and every range of token counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Ggml

from rapid_llm.kernels import use_backend
from rapid_llm.kernels.registry import get_op
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import Decoder, activation_dtype
from rapid_llm.models.gguf import GGUFFile
from rapid_llm.models.op_table import BUCKET_LIMITS, USUAL_OPS, buckets, find
from rapid_llm.models.rotary_table import rotary_table
from rapid_llm.models.weights import load_weights
from tests.models import reference_decoder, tiny
from tests.models.paged import PagedRunner

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FACTORS = (1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0)


def build(model: tiny.TinyModel, dtype: str = "float32", device: torch.device = CPU) -> Decoder:
    file = GGUFFile(model.path)
    config = ModelConfig.from_gguf(file)
    weights = load_weights(file, config, device=device, dtype=activation_dtype(dtype, device))
    return Decoder(config, weights, device=device, dtype=dtype)


def random_ids(count: int, vocab: int = 96, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def expect(model: tiny.TinyModel, ids: list[int]) -> torch.Tensor:
    return reference_decoder.logits(model.weights, model.shape, ids)


def assert_close(got: torch.Tensor, want: torch.Tensor, relative: float = 2e-5) -> None:
    """Element error against the largest logit: fp32 sums in another order, nothing more."""
    got = got.cpu()
    assert got.shape == want.shape
    worst = (got - want).abs().max() / want.abs().max()
    assert worst < relative, f"relative error {worst:.2e}"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    return tiny.make(tmp_path_factory.mktemp("llama") / "m.gguf", quant=Ggml.Q4_1)


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="module")
def decoder(llama: tiny.TinyModel, device: torch.device) -> Decoder:
    return build(llama, device=device)


SHAPES = [
    tiny.Shape(),
    tiny.Shape(tied=False, kv_heads=4),
    replace(tiny.Shape(), rope_factors=FACTORS),
    tiny.qwen2(),
    tiny.qwen3(),
]


@pytest.mark.parametrize("shape", SHAPES, ids=["llama", "llama-mha-untied", "llama3-rope", "qwen2", "qwen3"])
def test_each_family_equals_the_slow_decoder(tmp_path: Path, shape: tiny.Shape, device: torch.device) -> None:
    """Catches a family's flag misread: bias, tied head, per-head norm, rotary factors, interleaving."""
    model = tiny.make(tmp_path / "m.gguf", shape)
    ids = random_ids(19)
    runner = PagedRunner(build(model, device=device), 1, 24)
    got = torch.cat([runner.logits([(0, ids[:17])]), runner.logits([(0, ids[17:18])]), runner.logits([(0, ids[18:])])])
    assert_close(got, expect(model, ids))


@pytest.mark.parametrize("quant", [Ggml.F16, Ggml.BF16, Ggml.Q8_0, Ggml.Q4_0, Ggml.Q4_1], ids=lambda q: q.name)
def test_each_format_is_exact_in_float32(tmp_path: Path, quant: Ggml, device: torch.device) -> None:
    """Catches activations or weights rounded under dtype float32, which promises exact ids."""
    model = tiny.make(tmp_path / "m.gguf", tiny.Shape(tied=False), quant=quant)
    ids = random_ids(12)
    runner = PagedRunner(build(model, device=device), 1, 16)
    assert_close(torch.cat([runner.logits([(0, ids[:11])]), runner.logits([(0, ids[11:])])]), expect(model, ids))


YOUNGER = [Ggml.Q5_0, Ggml.Q5_1, *tiny.UNQUANTISABLE]


@pytest.mark.parametrize("quant", YOUNGER, ids=lambda q: q.name)
def test_each_younger_format_is_exact_in_float32(tmp_path: Path, quant: Ggml, device: torch.device) -> None:
    """Catches the same for blocks of 256, in matrices, in the embedding and in a head of its own."""
    shape = tiny.Shape(hidden=256, wide=256, head_dim=64, tied=False)
    model = tiny.make(tmp_path / "m.gguf", shape, quant=quant)
    ids = random_ids(20)
    runner = PagedRunner(build(model, device=device), 1, 24)
    assert_close(torch.cat([runner.logits([(0, ids[:19])]), runner.logits([(0, ids[19:])])]), expect(model, ids))


def test_layers_may_differ_in_format(tmp_path: Path) -> None:
    """Catches one layer's scheme used for all, and a mixed group computed as blocks."""
    types = {"blk.1.attn_output.weight": Ggml.Q8_0, "blk.0.attn_v.weight": Ggml.Q4_0, "blk.1.ffn_down.weight": Ggml.F32}
    model = tiny.make(tmp_path / "m.gguf", quant=Ggml.Q4_1, types=types)
    ids = random_ids(9)
    assert_close(PagedRunner(build(model), 1, 16).logits([(0, ids)]), expect(model, ids))


@pytest.mark.parametrize("count", [1, 2, 8, 9, 16, 17, 31, 32, 33, 64])
def test_every_range_of_token_counts(llama: tiny.TinyModel, decoder: Decoder, count: int) -> None:
    """Catches a bucket whose row or packed weight is wrong, and a page edge taken one token early or late."""
    ids = random_ids(count, seed=count)
    assert_close(PagedRunner(decoder, 1, count).logits([(0, ids)]), expect(llama, ids))


@pytest.mark.parametrize("size", [1, 5, 15, 16])
def test_chunks_equal_the_whole(llama: tiny.TinyModel, decoder: Decoder, size: int) -> None:
    """Catches positions or the causal mask restarted at each chunk."""
    ids = random_ids(33, seed=3)
    runner = PagedRunner(decoder, 1, 33)
    got = torch.cat([runner.logits([(0, ids[i : i + size])]) for i in range(0, 33, size)])
    assert_close(got, expect(llama, ids))


def test_a_ragged_batch_equals_each_sequence_alone(llama: tiny.TinyModel, decoder: Decoder) -> None:
    """Catches keys of one sequence seen by another, and prefill, resumed chunk and decode mixed up in one pass."""
    prompts = [random_ids(n, seed=n) for n in (3, 40, 17, 1)]
    runner = PagedRunner(decoder, 4, 48)
    first = runner.logits([(1, prompts[1][:39]), (2, prompts[2][:10])])
    mixed = runner.logits([(0, prompts[0]), (1, prompts[1][39:]), (2, prompts[2][10:]), (3, prompts[3])])
    want = [expect(llama, p) for p in prompts]
    assert_close(first, torch.cat([want[1][:39], want[2][:10]]))
    assert_close(mixed, torch.cat([want[0], want[1][39:], want[2][10:], want[3]]))


def test_a_decode_batch_equals_each_sequence_alone(llama: tiny.TinyModel, decoder: Decoder) -> None:
    """Catches a decode row that mixes up the sequences' lengths or page tables."""
    prompts = [random_ids(n, seed=n) for n in (5, 33, 16)]
    runner = PagedRunner(decoder, 3, 48)
    runner.hidden([(i, p[:-1]) for i, p in enumerate(prompts)])
    got = runner.logits([(i, p[-1:]) for i, p in enumerate(prompts)])
    assert_close(got, torch.stack([expect(llama, p)[-1] for p in prompts]))


def test_an_empty_batch_gives_no_rows(decoder: Decoder) -> None:
    """Catches an op that fails on zero tokens."""
    runner = PagedRunner(decoder, 1, 16)
    empty = torch.empty(0, 64, device=decoder.device)
    assert decoder.compute_logits(empty).shape == (0, 96)
    assert runner.hidden([]).shape == (0, 64)


def test_a_cache_of_another_depth_is_refused(decoder: Decoder) -> None:
    """Catches layers that share a cache, or run without one, because the engine allocated too few."""
    runner = PagedRunner(decoder, 1, 16)
    runner.kv.pop()
    with pytest.raises(ValueError, match="zip"):
        runner.hidden([(0, [1])])


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_faster_dtypes_stay_near(llama: tiny.TinyModel, dtype: str, device: torch.device) -> None:
    """Catches a row that is fast because it computes something else: errors beyond what 8 bits of mantissa explain."""
    ids = random_ids(40, seed=5)
    fast = build(llama, dtype, device)
    exact = dtype == "auto" and device.type == "cpu"
    assert fast.activation_dtype == (torch.float32 if exact else torch.bfloat16)
    runner = PagedRunner(fast, 1, 48)
    got = torch.cat([runner.logits([(0, ids[:35])])] + [runner.logits([(0, [t])]) for t in ids[35:]])
    assert got.dtype == torch.float32
    assert_close(got, expect(llama, ids), relative=0.05)


def test_float32_allows_no_rounding_and_auto_all(llama: tiny.TinyModel, decoder: Decoder) -> None:
    """Catches a float32 that is fast by rounding, or an auto that never may."""
    exact = {r for _, _, handle in decoder.bindings() for r in handle.decision.facts.allow}
    assert exact == set()
    assert all(not handle.spec.roundings for _, _, handle in decoder.bindings())
    auto = {
        r for _, op, handle in build(llama, "auto").bindings() if op == "linear" for r in handle.decision.facts.allow
    }
    assert auto == set(get_op("linear").numerics.roundings)


def test_bindings_name_every_op_in_every_range(decoder: Decoder) -> None:
    """Catches an op that runs and is not reported."""
    by_bucket: dict[str, set[str]] = {}
    for bucket, op, handle in decoder.bindings():
        by_bucket.setdefault(bucket, set()).add(op)
        assert handle.spec.op == op
    assert set(by_bucket) == {str(b) for b in buckets(decoder.device)}
    assert all(ops == set(USUAL_OPS) for ops in by_bucket.values())


def test_buckets_cover_every_count_once() -> None:
    """Catches a token count in no bucket or in two, and a row's own limit inside a bucket."""
    ranges = buckets()
    limits = [b.high for b in ranges if b.high is not None]
    assert set(BUCKET_LIMITS) <= set(limits)
    for tokens in range(1, 200):
        holding = [b for b in ranges if b.low <= tokens and (b.high is None or tokens <= b.high)]
        assert holding == [ranges[find(limits, tokens)]]
    assert find(limits, 0) == 0


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def call(self, op_id: str, row_name: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append((op_id, row_name))
        return fn(*args, **kwargs)


def test_an_observer_sees_every_call_and_changes_nothing(decoder: Decoder) -> None:
    """Catches a call that statistics miss, and an observer that stays after it is taken off."""
    ids = random_ids(6)
    plain = PagedRunner(decoder, 1, 16).logits([(0, ids)])
    recorder = _Recorder()
    decoder.observe(recorder)
    try:
        seen = PagedRunner(decoder, 1, 16).logits([(0, ids)])
    finally:
        decoder.observe(None)
    assert torch.equal(seen, plain)
    ops = [op for op, _ in recorder.calls]
    assert len(ops) == 2 + 9 * tiny.LAYERS + 1
    assert ops[:3] == ["embedding", "rmsnorm", "linear"]
    assert ops[-1] == "linear"
    rows = {(op, handle.spec.name) for _, op, handle in decoder.bindings()}
    assert set(recorder.calls) <= rows
    count = len(recorder.calls)
    PagedRunner(decoder, 1, 16).logits([(0, ids)])
    assert len(recorder.calls) == count


def test_memory_counts_what_is_held_once(tmp_path: Path) -> None:
    """Catches a tied head counted twice, and a copy that no figure shows."""
    model = tiny.make(tmp_path / "m.gguf", quant=Ggml.Q8_0)
    memory = build(model).memory()
    file = GGUFFile(model.path)
    blocks = sum(i.nbytes for i in file.tensors.values() if i.type == "Q8_0")
    vectors = sum(i.nbytes for i in file.tensors.values() if i.type == "F32")
    assert memory["weights_dense"] == vectors
    assert file.tensors["token_embd.weight"].nbytes <= memory["weights_quantized"] <= blocks
    assert memory["weights_quantized"] + memory["weights_packed"] >= blocks
    assert memory["rotary_table"] == 128 * 16 * 4


@pytest.mark.parametrize("quant", [Ggml.Q4_0, Ggml.Q4_1, Ggml.Q8_0], ids=lambda q: q.name)
def test_packed_forms_are_made_once_and_counted(tmp_path: Path, quant: Ggml) -> None:
    """Catches a packed weight given to the wrong row or range, blocks kept that no row reads, and uncounted copies."""
    model = tiny.make(tmp_path / "m.gguf", quant=quant)
    with use_backend("torch", "linear"):
        packed = build(model)
    ids = random_ids(40, seed=8)
    runner = PagedRunner(packed, 1, 48)
    got = torch.cat([runner.logits([(0, ids[:36])]), runner.logits([(0, ids[36:39])]), runner.logits([(0, ids[39:])])])
    assert_close(got, expect(model, ids))
    handles = [handle for _, op, handle in packed.bindings() if op == "linear"]
    assert all(handle.spec.backend == "torch" and handle.spec.prepack for handle in handles)
    memory = packed.memory()
    assert memory["weights_quantized"] == GGUFFile(model.path).tensors["token_embd.weight"].nbytes
    blocks = sum(i.nbytes for i in GGUFFile(model.path).tensors.values() if i.type == quant.name)
    forms = len({handle.spec.prepack for handle in handles})
    assert memory["weights_packed"] > blocks * 0.9
    assert memory["weights_packed"] < blocks * 8.5 * forms


def test_the_rotary_table_is_exact_at_the_far_end(tmp_path: Path) -> None:
    """Catches angles taken in fp32, which are off by 1e-3 at position 8191."""
    model = tiny.make(tmp_path / "m.gguf", tiny.Shape(context=8192))
    config = ModelConfig.from_gguf(GGUFFile(model.path))
    table = rotary_table(config.rope, config.rotary_dim, config.max_model_len)
    i, position = 1, 8191
    angle = torch.tensor(position * config.rope_theta ** (-2 * i / 16), dtype=torch.float64)
    assert abs(table[position, i] - angle.cos()) < 1e-7
    assert abs(table[position, 8 + i] - angle.sin()) < 1e-7


def test_wrong_dtypes_are_refused(llama: tiny.TinyModel, tmp_path: Path) -> None:
    """Catches a dtype silently replaced, and dense weights of another dtype multiplied with the activations."""
    for dtype in ("int8", "fp64", "half", ""):
        with pytest.raises(ValueError, match=r"is not one of auto, fp32, bf16, fp16"):
            activation_dtype(dtype, CPU)
    file = GGUFFile(tiny.make(tmp_path / "m.gguf").path)
    config = ModelConfig.from_gguf(file)
    weights = load_weights(file, config, device=CPU, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"weights are torch.bfloat16, activations torch.float32"):
        Decoder(config, weights, device=CPU, dtype="float32")
