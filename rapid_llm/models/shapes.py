"""Shapes of well-known models, by name, for benchmarks that need no file: `shape_config("llama-3.1-8b")`.

A shape is the public config.json of a model, read by the very code that reads the files; what is random is the weights
(`random_weights`). Sizes follow from the configuration alone, so that a model that does not fit is known before it is
made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from .config import ModelConfig
from .errors import UnknownModelError


def _llama3(factor: float, **sizes: Any) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    fixed = {"vocab_size": 128_256, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
    ids = {"bos_token_id": 128_000, "eos_token_id": 128_001}
    return {"model_type": "llama", **fixed, **ids, "rope_scaling": scaling, **sizes}


def _qwen3(**sizes: Any) -> dict[str, Any]:
    fixed = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0}
    ids = {"bos_token_id": 151_643, "eos_token_id": 151_645}
    return {"model_type": "qwen3", "head_dim": 128, **fixed, **ids, **sizes}


def _qwen2(**sizes: Any) -> dict[str, Any]:
    fixed = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0}
    return {"model_type": "qwen2", "bos_token_id": 151_643, "eos_token_id": 151_645, **fixed, **sizes}


def _smollm2(**sizes: Any) -> dict[str, Any]:
    fixed = {"vocab_size": 49_152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    return {"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2, **fixed, **sizes}


def _sizes(hidden: int, wide: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


_MISTRAL: Final = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}

SHAPES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama-3.2-1b": _llama3(32.0, **_sizes(2048, 8192, 16, 32, 8), head_dim=64, tie_word_embeddings=True),
        "llama-3.2-3b": _llama3(32.0, **_sizes(3072, 8192, 28, 24, 8), head_dim=128, tie_word_embeddings=True),
        "llama-3.1-8b": _llama3(8.0, **_sizes(4096, 14336, 32, 32, 8)),
        "llama-3.1-70b": _llama3(8.0, **_sizes(8192, 28672, 80, 64, 8)),
        "qwen3-0.6b": _qwen3(**_sizes(1024, 3072, 28, 16, 8), tie_word_embeddings=True),
        "qwen3-1.7b": _qwen3(**_sizes(2048, 6144, 28, 16, 8), tie_word_embeddings=True),
        "qwen3-4b": _qwen3(**_sizes(2560, 9728, 36, 32, 8), tie_word_embeddings=True),
        "qwen3-8b": _qwen3(**_sizes(4096, 12288, 36, 32, 8)),
        "qwen3-32b": _qwen3(**_sizes(5120, 25600, 64, 64, 8)),
        "qwen3-30b-a3b": {
            **_qwen3(**_sizes(2048, 6144, 48, 32, 4)),
            "model_type": "qwen3_moe",
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
        "qwen2.5-0.5b": _qwen2(**_sizes(896, 4864, 24, 14, 2), vocab_size=151_936, tie_word_embeddings=True),
        "qwen2.5-7b": _qwen2(**_sizes(3584, 18944, 28, 28, 4), vocab_size=152_064),
        "smollm2-135m": _smollm2(**_sizes(576, 1536, 30, 9, 3), rope_theta=100_000.0),
        "smollm2-1.7b": _smollm2(**_sizes(2048, 8192, 24, 32, 32), rope_theta=130_000.0),
        "mistral-7b": {
            "model_type": "mistral",
            "vocab_size": 32_768,
            "sliding_window": None,
            **_MISTRAL,
            **_sizes(4096, 14336, 32, 32, 8),
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "mixtral-8x7b": {
            "model_type": "mixtral",
            "vocab_size": 32_000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            **_MISTRAL,
            **_sizes(4096, 14336, 32, 32, 8),
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "gemma-2-2b": {
            "model_type": "gemma2",
            "vocab_size": 256_000,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            **_sizes(2304, 9216, 26, 8, 4),
            "bos_token_id": 2,
            "eos_token_id": [1, 107],
            "rms_norm_eps": 1e-6,
        },
        "gemma-3-1b": {
            "model_type": "gemma3_text",
            "vocab_size": 262_144,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            **_sizes(1152, 6912, 26, 4, 1),
            "max_position_embeddings": 32_768,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "bos_token_id": 2,
            "eos_token_id": [1, 106],
            "rms_norm_eps": 1e-6,
        },
        "phi-3-mini-4k": {
            "model_type": "phi3",
            "vocab_size": 32_064,
            "max_position_embeddings": 4096,
            "sliding_window": 2047,
            **_sizes(3072, 8192, 32, 32, 32),
            "bos_token_id": 1,
            "eos_token_id": 32_000,
        },
    }
)
"""Name -> what the model's config.json states."""


def shape_config(name: str) -> ModelConfig:
    """The configuration of a named shape; raises `UnknownModelError`, which lists the names, for any other."""
    if name not in SHAPES:
        import difflib  # only a wrong name pays for it

        near = difflib.get_close_matches(name, SHAPES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UnknownModelError(f"unknown shape {name!r}{hint} Known: {', '.join(SHAPES)}")
    return ModelConfig.from_hf(SHAPES[name], name=name)


def matrices(config: ModelConfig) -> Iterator[tuple[str, int, int, int]]:
    """(name, count, rows, columns) of every kind of matrix that the model holds; the head, if it is one of its own.

    Names are those of `LayerWeights` and `ModelWeights`; `experts.gate_up` and `experts.down` count every expert.
    """
    c = config
    sparse = sum(c.has_experts(i) for i in range(c.num_layers))
    dense, wide, hidden = c.num_layers - sparse, c.intermediate_size, c.hidden_size
    yield "embedding", 1, c.vocab_size, hidden
    yield "qkv", c.num_layers, c.q_size + 2 * c.kv_size, hidden
    yield "o", c.num_layers, hidden, c.q_size
    if dense:
        yield "gate_up", dense, 2 * wide, hidden
        yield "down", dense, hidden, wide
    if sparse:
        yield "router", sparse, c.num_experts, hidden
        yield "experts.gate_up", sparse * c.num_experts, 2 * c.expert_size, hidden
        yield "experts.down", sparse * c.num_experts, hidden, c.expert_size
    if not c.tie_word_embeddings:
        yield "head", 1, c.vocab_size, hidden


def vectors(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """(name, count, size) of every kind of norm and bias that the model holds."""
    c, family = config, config.family
    yield "final_norm", 1, c.hidden_size
    for name in ("attn_norm", "ffn_norm", *(("post_attn_norm", "post_ffn_norm") if family.post_norms else ())):
        yield name, c.num_layers, c.hidden_size
    if family.qk_norm:
        yield "q_norm", c.num_layers, c.head_dim
        yield "k_norm", c.num_layers, c.head_dim
    if family.qkv_bias or c.attention_bias:
        yield "qkv_bias", c.num_layers, c.q_size + 2 * c.kv_size
    if c.attention_bias:
        yield "o_bias", c.num_layers, c.hidden_size


def parameter_count(config: ModelConfig) -> int:
    """How many numbers the model consists of, the head counted where it is not the embedding."""
    held = sum(count * rows * columns for _, count, rows, columns in matrices(config))
    return held + sum(count * size for _, count, size in vectors(config))
