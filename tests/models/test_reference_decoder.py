"""The slow decoder against transformers: the oracle of the decoder's tests is itself checked, family by family."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.models import reference_decoder, tiny

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    **{f"attn_{n}.{kind}": f"self_attn.{n}_proj.{kind}" for n in "qkv" for kind in ("weight", "bias")},
    **{f"ffn_{n}.weight": f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def _hub_name(name: str) -> str:
    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name.startswith("blk."):
        _, layer, rest = name.split(".", 2)
        return f"model.layers.{layer}.{_NAMES[rest]}"
    return top.get(name, "lm_head.weight")


def _transformers_logits(shape: tiny.Shape, weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    family = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[shape.arch]
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": shape.theta}
    if shape.rope_factors is not None:
        rope |= {"rope_type": "llama3", **_LLAMA3}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.wide,
        num_hidden_layers=tiny.LAYERS,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        rms_norm_eps=shape.eps,
        rope_parameters=rope,
        tie_word_embeddings=shape.tied,
        attn_implementation="eager",
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    state = {_hub_name(name): w for name, w in weights.items() if name != "rope_freqs.weight"}
    if shape.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def _llama3_factors(shape: tiny.Shape) -> tuple[float, ...]:
    """What a converter writes to rope_freqs.weight: the divisor of each frequency under the Llama 3 rule."""
    out = []
    length, low, high = _LLAMA3["original_max_position_embeddings"], 1.0, 4.0
    for i in range(shape.head_dim // 2):
        wavelength = 2 * torch.pi * shape.theta ** (2 * i / shape.head_dim)
        blend = (length / wavelength - low) / (high - low)
        out.append(1 / ((1 - min(max(blend, 0.0), 1.0)) / 8.0 + min(max(blend, 0.0), 1.0)))
    return tuple(out)


@pytest.mark.parametrize(
    "shape",
    [
        tiny.Shape(),
        tiny.Shape(kv_heads=4, theta=100.0),
        replace(tiny.Shape(), rope_factors=_llama3_factors(tiny.Shape())),
        tiny.qwen2(),
        tiny.qwen3(),
    ],
    ids=["llama", "llama-mha", "llama3-rope", "qwen2", "qwen3"],
)
def test_it_equals_transformers(shape: tiny.Shape) -> None:
    """Catches a misunderstanding shared by our decoder and its oracle: rotation, grouping of heads, norms, factors."""
    weights = {name: torch.from_numpy(w) for name, w in tiny.dense_weights(shape, seed=1).items()}
    ids = torch.randint(0, shape.vocab, (21,), generator=torch.Generator().manual_seed(0)).tolist()
    ours = reference_decoder.logits(weights, shape, ids)
    theirs = _transformers_logits(shape, weights, ids)
    assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()
