"""Steps of one token by the fused ops: the same decoder in fewer calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Ggml

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import Decoder
from rapid_llm.models.gguf import GGUFFile
from rapid_llm.models.weights import load_weights
from tests.models import reference_decoder, tiny
from tests.models.paged import PagedRunner

pytestmark = pytest.mark.usefixtures("one_thread")

FUSED = {"linear_add", "rmsnorm_linear", "rmsnorm_linear_silu_and_mul"}


class Calls:
    """An observer that notes the ops of a step."""

    def __init__(self) -> None:
        self.ops: list[str] = []

    def call(self, op_id, row_name, fn, args, kwargs):  # type: ignore[no-untyped-def]
        self.ops.append(op_id)
        return fn(*args, **kwargs)


def build(model: tiny.TinyModel, device: str, fuse: bool | None) -> Decoder:
    file, where = GGUFFile(model.path), torch.device(device)
    config = ModelConfig.from_gguf(file)
    weights = load_weights(file, config, device=where, dtype=torch.float32)
    return Decoder(config, weights, device=where, dtype="float32", fuse=fuse)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "shape", [tiny.Shape(), tiny.Shape(tied=False, kv_heads=4), tiny.qwen2(), tiny.qwen3()], ids=lambda s: s.arch
)
def test_one_token_at_a_time_equals_the_slow_decoder(tmp_path: Path, shape: tiny.Shape, device: str) -> None:
    """Catches: a norm taken from another layer, a bias or a per-head norm left out, a residual added twice or not."""
    model = tiny.make(tmp_path / "m.gguf", shape)
    ids = torch.randint(0, 96, (9,), generator=torch.Generator().manual_seed(1)).tolist()
    decoder = build(model, device, True)
    runner, calls = PagedRunner(decoder, 1, 16), Calls()
    got = [runner.logits([(0, ids[:4])])]
    decoder.observe(calls)
    got += [runner.logits([(0, [token])]) for token in ids[4:]]
    want = reference_decoder.logits(model.weights, model.shape, ids)
    assert ((torch.cat(got).cpu() - want).abs().max() / want.abs().max()).item() < 2e-5
    assert set(calls.ops) >= FUSED
    assert "fused_add_rmsnorm" not in calls.ops
    assert calls.ops.count("linear") == len(ids[4:])  # the head alone
    assert {op for _, op, _ in decoder.bindings()} >= FUSED


def test_the_engine_explains_the_fused_ops(tmp_path: Path) -> None:
    """Catches: a report that fails, or is silent, on an op whose dimensions have other names than those of linear."""
    from rapid_llm import LLM
    from tests.engine.mocks import byte_tokenizer

    model = tiny.make(tmp_path / "m.gguf")
    said = LLM.from_parts(build(model, "cpu", True), byte_tokenizer(), threads=1, kv_cache_tokens=64).explain()
    sizes = f"{model.shape.hidden} -> {model.shape.wide}"
    assert f"rmsnorm_linear_silu_and_mul {sizes}" in {binding.what for binding in said.bindings}
    assert "rmsnorm_linear_silu_and_mul" in str(said)
    assert {binding.op for binding in said.bindings} >= FUSED


def test_who_does_not_fuse(tmp_path: Path) -> None:
    """Catches: a fused op over blocks that it cannot read, or used where it is no better than its parts."""
    dense = tiny.make(tmp_path / "dense.gguf")
    blocks = tiny.make(tmp_path / "blocks.gguf", quant=Ggml.Q8_0)
    for model, fuse in ((blocks, True), (dense, False), (dense, None)):
        decoder = build(model, "cpu", fuse)
        assert not {op for _, op, _ in decoder.bindings()} & FUSED
        assert not {handle.spec.op for handle in decoder.handles(1)} & FUSED
