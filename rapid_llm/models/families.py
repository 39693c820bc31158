"""The table of model families: what no row describes is an error and not a guess."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"
"""The names that transformers gives to layers with and without a window."""

Windows = Callable[[Mapping[str, Any], int], tuple[int, ...]]
"""From the keys of a config.json (defaults filled in) and the number of layers: each layer's window, 0 for none; empty
where no layer has one."""


def nowhere(stated: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """No layer has a window."""
    return ()


def everywhere(stated: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """`sliding_window`, where stated, holds for every layer (Mistral, Mixtral, Phi-3)."""
    window = stated.get("sliding_window")
    return (int(window),) * layers if window else ()


def where_used(stated: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """`everywhere`, if `use_sliding_window` (Qwen3-MoE)."""
    return everywhere(stated, layers) if stated.get("use_sliding_window") else ()


def late(stated: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """If `use_sliding_window`, the layers from `max_window_layers` on (Qwen2, Qwen3)."""
    if not stated.get("use_sliding_window"):
        return ()
    first = int(stated["max_window_layers"])
    return _by_type(stated, [SLIDING if i >= first else FULL for i in range(layers)])


def alternating(stated: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """All but every n-th layer, n = `sliding_window_pattern` (Gemma 2: 2; Gemma 3: 6)."""
    pattern = int(stated["sliding_window_pattern"])
    return _by_type(stated, [SLIDING if (i + 1) % pattern else FULL for i in range(layers)])


def _by_type(stated: Mapping[str, Any], otherwise: list[str]) -> tuple[int, ...]:
    """`layer_types`, where stated, comes before what the family does otherwise."""
    window = int(stated.get("sliding_window") or 0)
    found = tuple(window if kind == SLIDING else 0 for kind in stated.get("layer_types") or otherwise)
    return found if any(found) else ()


@dataclass(frozen=True, slots=True)
class Architecture:
    """What distinguishes one family: a row of this table is all that a new one needs.

    name: `general.architecture` of a GGUF file, or ours where GGUF has no name of its own. model_types: of config.json.
    qk_permuted: GGUF's converter interleaved the rotary pairs of attn_q and attn_k, and loading undoes it. qkv_bias: q,
    k and v always carry biases. rope_factors: a GGUF file may divide the rotary frequencies by `rope_freqs.weight`
    (Llama 3). qk_norm: q and k are normalised per head before the rotation. norm_offset: config.json's checkpoints
    store norms as the difference from one. post_norms: attention and feed-forward are normalised once more behind.
    scaled_embedding: embeddings are multiplied by sqrt(hidden_size). gelu: the gate's function is GELU (tanh form), not
    SiLU. fused: q, k, v are one tensor, gate and up another. windows: which layers look back how far. local_theta: the
    rotary base of layers with a window, where it is one of its own. theta: the base where a config.json states none.
    defaults: keys that a config.json may leave out. reads: keys that this family alone has, beside those of `defaults`.
    """

    name: str
    model_types: tuple[str, ...] = ()
    in_gguf: bool = True
    qk_permuted: bool = False
    qkv_bias: bool = False
    rope_factors: bool = False
    qk_norm: bool = False
    norm_offset: bool = False
    post_norms: bool = False
    scaled_embedding: bool = False
    gelu: bool = False
    fused: bool = False
    windows: Windows = nowhere
    local_theta: float | None = None
    theta: float = 10_000.0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()


def _row(name: str, *model_types: str, defaults: Mapping[str, Any], **flags: Any) -> Architecture:
    return Architecture(name, model_types, defaults=MappingProxyType(dict(defaults)), **flags)


_QWEN: Final = {
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA: Final = {
    "vocab_size": 256_000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA_FLAGS: Final[Mapping[str, Any]] = {
    "norm_offset": True,
    "post_norms": True,
    "scaled_embedding": True,
    "gelu": True,
    "windows": alternating,
    "reads": ("attention_bias", "use_bidirectional_attention", "layer_types"),
}

ROWS: Final = (
    _row(
        "llama",
        "llama",
        qk_permuted=True,
        rope_factors=True,
        defaults={"max_position_embeddings": 2048},
        reads=("attention_bias", "mlp_bias", "pretraining_tp"),
    ),
    _row(
        "mistral",
        "mistral",
        in_gguf=False,
        windows=everywhere,
        defaults={"max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8},
    ),
    _row(
        "mixtral",
        "mixtral",
        in_gguf=False,
        windows=everywhere,
        theta=1_000_000.0,
        defaults={
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
    ),
    _row("qwen2", "qwen2", qkv_bias=True, windows=late, defaults=_QWEN, reads=("layer_types",)),
    _row(
        "qwen3",
        "qwen3",
        qk_norm=True,
        windows=late,
        defaults={**_QWEN, "head_dim": 128},
        reads=("attention_bias", "layer_types"),
    ),
    _row(
        "qwen3moe",
        "qwen3_moe",
        qk_norm=True,
        windows=where_used,
        defaults={
            "max_position_embeddings": 32_768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": (),
        },
        reads=("attention_bias", "max_window_layers"),
    ),
    _row("gemma2", "gemma2", defaults=_GEMMA, **_GEMMA_FLAGS),
    _row(
        "gemma3",
        "gemma3_text",
        "gemma3",
        qk_norm=True,
        theta=1_000_000.0,
        local_theta=10_000.0,
        defaults={
            **{k: v for k, v in _GEMMA.items() if k != "attn_logit_softcapping"},  # which transformers passes over here
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
        },
        **{**_GEMMA_FLAGS, "reads": (*_GEMMA_FLAGS["reads"], "rope_local_base_freq")},
    ),
    _row(
        "phi3",
        "phi3",
        fused=True,
        windows=everywhere,
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
    ),
)

ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType({row.name: row for row in ROWS})
BY_MODEL_TYPE: Final[Mapping[str, Architecture]] = MappingProxyType({t: row for row in ROWS for t in row.model_types})
