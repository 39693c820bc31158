"""The places of calls in models of other families than Llama's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from rapid_llm.locate import Configuration
from rapid_llm.locate.calls import Call, Place, Watch, matrices, slots
from rapid_llm.locate.locate import locate
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.gguf import GGUFFile
from tests.models import hf_tiny, test_families_gguf
from tests.models.paged import PagedRunner

OPS = {
    "embedding": "embedding",
    "embedding_scale": "scale",
    "rope": "rope_kvcache_write",
    "attention": "attention.prefill",
    "topk": "moe.topk",
    "experts": "fused_moe",
    **dict.fromkeys(("qkv", "o", "gate_up", "down", "router", "head"), "linear"),
    **dict.fromkeys(("q_norm", "k_norm", "post_attn_norm", "post_ffn_norm"), "rmsnorm"),
}


class Seen(Watch):
    """Notes the op of every place."""

    def __init__(self, decoder: Any) -> None:
        super().__init__(slots(decoder.config))
        self.ops: list[tuple[str, str]] = []

    def see(self, place: Place, call: Call) -> Any:
        self.ops.append((place.slot.name, call.op))
        return call.run()


@pytest.mark.parametrize("family", ["gemma3", "qwen3-moe"])
def test_every_call_stands_where_its_slot_says(tmp_path: Path, family: str) -> None:
    """Catches calls that are counted as another place's once a family has more of them than a Llama."""
    made = hf_tiny.make(tmp_path, family)
    decoder = hf_tiny.decoder(made, max_model_len=64)
    watch = Seen(decoder)
    watch.begin(0)
    decoder.observe(watch)
    PagedRunner(decoder, 1, 16).logits([(0, hf_tiny.random_ids(9))])
    assert [name for name, _ in watch.ops] == [slot.name for slot in slots(decoder.config)]
    assert all(OPS.get(name, op) == op for name, op in watch.ops)
    linear = {slot for slot in slots(decoder.config) if OPS.get(slot.name) in ("linear", "embedding")}
    weights = hf_tiny.weights(made)
    assert set(matrices(weights)) == linear


def test_experts_of_two_dtypes_are_compared(tmp_path: Path) -> None:
    """Catches a comparison that cannot run a choice of experts: two results of one op, weights that stay float32."""
    test_families_gguf.write(tmp_path, "mixtral")
    file = GGUFFile(tmp_path / "m.gguf")
    sides = (Configuration.parse("native dtype=fp32"), Configuration.parse("native dtype=bf16"))
    found = locate(file, ModelConfig.from_gguf(file), *sides, [hf_tiny.random_ids(9), hf_tiny.random_ids(3)]).diagnosis
    assert found.guilty == ()
    assert 0.0 < found.whole.difference < 0.1
