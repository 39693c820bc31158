"""`ModelConfig` from a config.json: each family's keys and defaults as transformers has them; refusal of all else."""

from __future__ import annotations

from typing import Any

import pytest

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.errors import MetadataError, ModelError, UnsupportedArchitectureError
from rapid_llm.models.families import BY_MODEL_TYPE
from rapid_llm.models.rope import Rope

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eos_token_id": [1, 106],
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
"""Of the default model, and of a model that sees images, as their makers published them."""

SMALL = {k: SMOLLM2[k] for k in ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
SMALL |= {"num_attention_heads": 9, "num_key_value_heads": 3}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**SMALL, **changes})


def test_every_field_is_read() -> None:
    """Catches a field read from another's key, and a harmless key refused."""
    config = ModelConfig.from_hf(SMOLLM2, name="SmolLM2")
    assert config == ModelConfig(
        architecture="llama",
        name="SmolLM2",
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rotary_dim=64,
        vocab_size=49152,
        num_tokens=49152,
        max_model_len=8192,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
        add_bos=False,
        chat_template=None,
    )


def test_a_nested_language_model_is_read_with_its_familys_defaults() -> None:
    """E23. Catches keys looked for at the wrong level, and a family's defaults (a tied head among them) not taken."""
    config = ModelConfig.from_hf(GEMMA3)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (2560, 34, 8, 4)
    assert (config.head_dim, config.vocab_size, config.max_model_len) == (256, 262_208, 131_072)
    assert (config.tie_word_embeddings, config.eos_token_ids) == (True, (1, 106))
    assert config.windows[:7] == (1024, 1024, 1024, 1024, 1024, 0, 1024)
    assert (config.rope_theta, config.local_rope, config.scale) == (1e6, Rope(1e4), 256**-0.5)


@pytest.mark.parametrize(("inner", "outer", "tied"), [(True, False, True), (False, True, False), (None, False, False)])
def test_the_inner_tie_flag_comes_first(inner: bool | None, outer: bool, tied: bool) -> None:
    """E23. Catches the flag of the whole model taken for the language model's own."""
    text = {**GEMMA3["text_config"], "tie_word_embeddings": inner}
    assert (
        ModelConfig.from_hf({**GEMMA3, "tie_word_embeddings": outer, "text_config": text}).tie_word_embeddings == tied
    )


@pytest.mark.parametrize("model_type", sorted(set(BY_MODEL_TYPE) - {"gemma3"}))
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """Catches a default that transformers has and we have not: a short config.json read by both gives the same."""
    transformers = pytest.importorskip("transformers")
    kind = type(transformers.AutoConfig.for_model(model_type))
    short = {**SMALL, "model_type": model_type, "hidden_size": 2048, "num_attention_heads": 32, "vocab_size": 300_000}
    del short["num_key_value_heads"]
    whole = kind(**{k: v for k, v in short.items() if k != "model_type"}).to_dict()
    absent = {"bos_token_id": None, "eos_token_id": None}
    assert ModelConfig.from_hf({**short, **absent}) == ModelConfig.from_hf({**whole, **absent})


def test_windows_of_each_family() -> None:
    """Catches a pattern off by a layer, a flag that turns windows off passed over, and `layer_types` not obeyed."""
    mistral = read(model_type="mistral", num_hidden_layers=3, sliding_window=8)
    assert mistral.windows == (8, 8, 8)
    assert read(model_type="mistral", sliding_window=None).windows == ()
    qwen = {"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 8, "max_window_layers": 3}
    assert read(**qwen).windows == ()
    assert read(**qwen, use_sliding_window=True).windows == (0, 0, 0, 8)
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert read(**qwen, use_sliding_window=True, layer_types=kinds).windows == (8, 0, 0, 8)
    gemma = {"head_dim": 64, "num_hidden_layers": 7, "sliding_window": 8}
    assert read(model_type="gemma2", **gemma).windows == (8, 0, 8, 0, 8, 0, 8)
    assert read(model_type="gemma3_text", **gemma).windows == (8, 8, 8, 8, 8, 0, 8)
    assert read(model_type="gemma3_text", **gemma, sliding_window_pattern=3).windows == (8, 8, 0, 8, 8, 0, 8)


def test_experts_of_each_layer() -> None:
    """Catches a dense layer taken for experts, both ways that a config.json may say so, and both names of the count."""
    moe = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 6, "num_experts_per_tok": 2}
    assert read(**moe).dense_layers == ()
    assert read(**moe, mlp_only_layers=[1]).dense_layers == (1,)
    config = read(**moe, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [config.has_experts(i) for i in range(4)] == [False, True, False, False]
    assert (config.renormalize, config.expert_size) == (False, 768)
    assert read(**{**moe, "num_local_experts": 5}).num_experts == 5
    mixtral = read(model_type="mixtral", num_local_experts=6)
    assert (mixtral.renormalize, mixtral.expert_size, mixtral.num_experts) == (True, 1536, 6)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"model_type": "mamba"}, UnsupportedArchitectureError, "'mamba' is not supported; supported: llama, mistral"),
        ({"model_type": None}, MetadataError, "'model_type' is missing"),
        ({"hidden_size": None}, MetadataError, "'hidden_size' is missing"),
        ({"hidden_size": 577}, MetadataError, "577 is not a multiple of its 9 heads"),
        ({"hidden_size": "wide"}, MetadataError, "'wide', not a int"),
        ({"num_key_value_heads": 2}, MetadataError, "cannot share 2"),
        ({"rms_norm_eps": 0.0}, MetadataError, "rms_norm_eps 0.0"),
        ({"tie_word_embeddings": 1}, MetadataError, "'tie_word_embeddings' is 1, not a bool"),
        ({"eos_token_id": [2, 49152]}, MetadataError, "49152, outside the vocabulary"),
        ({"logit_scale": 0.5}, UnsupportedArchitectureError, "'logit_scale' = 0.5 is not understood"),
        ({"sliding_window": 4096}, UnsupportedArchitectureError, "'sliding_window' = 4096 is not understood"),
        ({"mlp_bias": True}, UnsupportedArchitectureError, "mlp_bias = True"),
        ({"rope_interleaved": True}, UnsupportedArchitectureError, "rope_interleaved = True"),
        ({"hidden_act": "gelu"}, UnsupportedArchitectureError, "'gelu' is not supported for llama: silu"),
        ({"architectures": ["LlamaForSequenceClassification"]}, UnsupportedArchitectureError, "does not predict"),
        ({"text_config": 5}, MetadataError, "text_config is 5"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, UnsupportedArchitectureError, "gelu_pytorch_tanh"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 5.0}, UnsupportedArchitectureError, "attn_logit_soft"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, UnsupportedArchitectureError, "bidirectional"),
        ({"model_type": "gemma2", "attn_logit_softcapping": -5.0}, MetadataError, "attention_softcap is -5.0"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, MetadataError, "9 of 8 experts"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, MetadataError, "decoder_sparse_step 0"),
    ],
)
def test_what_is_not_understood_or_impossible_is_refused(
    changes: dict[str, Any], error: type[ModelError], match: str
) -> None:
    """Catches a key that changes the model's function being ignored, a value that would surface as wrong numbers."""
    with pytest.raises(error, match=match) as caught:
        read(**changes)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize("harmless", [{"anything": None}, {"anything": False}, {"_private": 3}, {"use_cache": True}])
def test_what_says_nothing_is_accepted(harmless: dict[str, Any]) -> None:
    """Catches a refusal of what changes nothing."""
    assert read(**harmless) == read()
