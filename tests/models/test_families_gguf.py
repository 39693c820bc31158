"""The families of GGUF that a converter changes most, against transformers' float64 logits of the same weights.

The converter here is the test's own, written from what llama.cpp's does: names, norms that become complete, rows of q
and k that are interleaved, experts that are stacked, LongRoPE's lists that become tensors.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import Decoder
from rapid_llm.models.gguf import GGUFFile
from rapid_llm.models.weights import load_weights
from tests.models import hf_tiny, tiny
from tests.models.test_families import LENGTH, PROMPT, truth_of

pytestmark = pytest.mark.usefixtures("one_thread")

_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "input_layernorm": "attn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_GEMMA_LAYER = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def converted(made: hf_tiny.Made, arch: str) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file."""
    config, gemma = made.model.config, arch.startswith("gemma")
    out: dict[str, np.ndarray] = {}
    for name, weight in made.model.state_dict().items():
        data, short = weight.detach().numpy(), name.removesuffix(".weight")
        if short in _TOP:
            at = _TOP[short]
        else:
            _, _, layer, part = short.split(".", 3)
            if part == "mlp.experts.gate_up_proj":
                gate, up = np.split(data, 2, axis=1)
                out[f"blk.{layer}.ffn_gate_exps.weight"], out[f"blk.{layer}.ffn_up_exps.weight"] = (
                    gate.copy(),
                    up.copy(),
                )
                continue
            names = {**_LAYER, "post_attention_layernorm": "ffn_norm", **(_GEMMA_LAYER if gemma else {})}
            at = f"blk.{layer}.{'ffn_down_exps' if part == 'mlp.experts.down_proj' else names[part]}"
        if gemma and "norm" in at:
            data = data + 1
        if arch == "llama" and at.endswith(("attn_q", "attn_k")):
            heads = config.num_attention_heads if at.endswith("q") else config.num_key_value_heads
            data = data[tiny.gguf_row_order(heads, data.shape[0] // heads)]
        if not (at == "output" and config.tie_word_embeddings):
            out[f"{at}.weight"] = data
    return out


def entries(made: hf_tiny.Made, arch: str, own: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a GGUF file: what all have, and `own`."""
    config = made.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    common = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    return {f"{arch}.{key}": value for key, value in {**common, **own}.items()}


_WINDOW = {"attention.sliding_window": hf_tiny.WINDOW, "final_logit_softcapping": 3.0}
_GEMMA2 = {**_WINDOW, "attn_logit_softcapping": 2.0, "attention.scale": 24**-0.5, "rope.freq_base": 10_000.0}
_GEMMA3 = {**_WINDOW, "attention.sliding_window_pattern": 2, "rope.freq_base": 1_000_000.0}
_PHI3 = {
    "attention.sliding_window": 12,
    "rope.dimension_count": 12,
    "rope.freq_base": 10_000.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.attn_factor": math.sqrt(1 + math.log(2) / math.log(64)),
}
_EXPERTS = {"expert_count": 6, "expert_used_count": 2, "rope.freq_base": 10_000.0}
_MIXTRAL = {**_EXPERTS, "rope.freq_base": 1_000_000.0}
_QWEN3_MOE = {**_EXPERTS, "expert_feed_forward_length": 40}

CASES = {
    "llama": ("llama", {}, {"rope.freq_base": 10_000.0}),
    "gemma2": ("gemma2", {}, _GEMMA2),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 32}, _GEMMA3),
    "phi3": ("phi3", {}, _PHI3),
    "mixtral": ("llama", {"sliding_window": None}, _MIXTRAL),
    "qwen3-moe": ("qwen3moe", {"mlp_only_layers": []}, _QWEN3_MOE),
}
"""Family of transformers -> GGUF's architecture, changes to the configuration, own metadata."""


def write(path: Path, family: str) -> hf_tiny.Made:
    """A folder of transformers, and beside it the same model as m.gguf."""
    arch, changes, own = CASES[family]
    made = hf_tiny.make(path / "hf", family, **changes)
    tensors = converted(made, arch)
    if arch == "phi3":
        rope = made.stated["rope_parameters"]
        for length in ("long", "short"):
            tensors[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
    tiny.write(path / "m.gguf", arch, entries(made, arch, own), tensors)
    return made


@pytest.mark.parametrize("family", CASES)
def test_prefill_and_decode_equal_transformers(tmp_path: Path, family: str) -> None:
    """Catches a converter's change not undone or undone twice (norms, rows, experts), and metadata misread."""
    made = write(tmp_path, family)
    truth = truth_of(made, hf_tiny.random_ids(LENGTH))
    file = GGUFFile(tmp_path / "m.gguf")
    config = ModelConfig.from_gguf(file)
    weights = load_weights(file, config, device=hf_tiny.CPU, dtype=torch.float32)
    ours = Decoder(config, weights, device=hf_tiny.CPU, dtype="float32", max_model_len=64)
    got = hf_tiny.stepwise(ours, truth.ids, PROMPT)
    # Metadata is fp32: a scale, a cap or an epsilon is off by 2**-25, as one rounding more.
    assert (got - truth.logits).abs().max() <= 2 * truth.bound


@pytest.mark.parametrize("family", CASES)
def test_both_files_give_the_same_configuration(tmp_path: Path, family: str) -> None:
    """Catches a key that one format's reader knows and the other's forgets."""
    made = write(tmp_path, family)
    ours, theirs = ModelConfig.from_gguf(GGUFFile(tmp_path / "m.gguf")), ModelConfig.from_hf(made.stated)
    for field in (
        "head_dim",
        "rotary_dim",
        "windows",
        "num_experts",
        "experts_per_token",
        "expert_size",
        "renormalize",
    ):
        assert getattr(ours, field) == getattr(theirs, field), field
    for field in ("scale", "attention_softcap", "logit_softcap", "rms_norm_eps"):
        assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=2**-23), field
    for one, other in ((ours.rope, theirs.rope), (ours.local_rope, theirs.local_rope)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            for length in (40, 100):
                pairs = one.frequencies(ours.rotary_dim, length), other.frequencies(ours.rotary_dim, length)
                assert pairs[0] == pytest.approx(pairs[1], rel=2**-22)
            assert one.scaling.magnitude == pytest.approx(other.scaling.magnitude, rel=2**-23)


def test_the_largest_gemmas_scale_by_hidden_over_heads(tmp_path: Path) -> None:
    """Catches scores of Gemma 2 27B and Gemma 3 27B scaled by the head's size, which their files do not contradict."""
    made = hf_tiny.make(tmp_path / "hf", "gemma2", num_hidden_layers=46)
    own = {key: value for key, value in _GEMMA2.items() if key != "attention.scale"}
    tensors = {"token_embd.weight": converted(made, "gemma2")["token_embd.weight"]}
    tiny.write(tmp_path / "m.gguf", "gemma2", entries(made, "gemma2", own), tensors)
    assert ModelConfig.from_gguf(GGUFFile(tmp_path / "m.gguf")).scale == (64 / 4) ** -0.5
