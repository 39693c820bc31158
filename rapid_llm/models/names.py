"""What a checkpoint calls its tensors: one table for GGUF, one for Hugging Face's checkpoints, and where they begin."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from .config import ModelConfig
from .errors import TensorSetError
from .gguf_config import LONG_FACTORS, SHORT_FACTORS

ROPE_FACTORS: Final = "rope_freqs.weight"
"""GGUF's divisors of the rotary frequencies."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the tensors outside of layers; those of layer i begin with `layer` (with its number in the place of
    {}), and `parts` maps what a part does to what follows. A matrix's own tensor adds `.weight`, a bias `.bias`.

    expert: a part of one expert, {} for its number; None where experts are stacked in one tensor. gguf: rows may be
    interleaved, and norms are complete. passed: beginnings and ends of names that hold nothing of a language model.
    """

    embedding: str
    final_norm: str
    head: str
    layer: str
    parts: Mapping[str, str]
    gguf: bool
    expert: Mapping[str, str] | None = None
    passed: tuple[str, ...] = ()

    def at(self, layer: int, part: str) -> str:
        """The beginning of a part's name, without `.weight` or `.bias`."""
        return self.layer.format(layer) + self.parts[part]

    def of_expert(self, layer: int, part: str, number: int) -> str:
        """The same for one expert."""
        if self.expert is None:
            raise ValueError(f"these names have no experts: expert {number} of layer {layer} was asked for")
        return self.layer.format(layer) + self.expert[part].format(number)

    def is_passed(self, name: str) -> bool:
        """Whether `name` is of another part of the checkpoint, or can be computed."""
        return name.startswith(self.passed) or name.endswith(".rotary_emb.inv_freq")


GGUF_PARTS: Final = MappingProxyType(
    {
        "attn_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "qkv": "attn_qkv",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "o": "attn_output",
        "post_attn_norm": "post_attention_norm",
        "ffn_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "gate_up": "ffn_up",
        "down": "ffn_down",
        "post_ffn_norm": "post_ffw_norm",
        "router": "ffn_gate_inp",
        "experts_gate": "ffn_gate_exps",
        "experts_up": "ffn_up_exps",
        "experts_down": "ffn_down_exps",
    }
)

_HF_PARTS: Final = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "qkv": "self_attn.qkv_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "o": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "gate_up": "mlp.gate_up_proj",
        "down": "mlp.down_proj",
        "router": "mlp.gate",
        "experts_gate_up": "mlp.experts.gate_up_proj",
        "experts_down": "mlp.experts.down_proj",
    }
)
_HF_POST_NORMS: Final = MappingProxyType(
    {
        "post_attn_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffn_norm": "post_feedforward_layernorm",
    }
)
_HF_EXPERT: Final = MappingProxyType({p: f"mlp.experts.{{}}.{p}_proj" for p in ("gate", "up", "down")})
_MIXTRAL_EXPERT: Final = MappingProxyType(
    {p: f"block_sparse_moe.experts.{{}}.{w}" for p, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}
)
_BEFORE: Final = ("model.", "language_model.model.", "model.language_model.")
"""Where a language model may begin, alone or within one that sees images."""

_OF_IMAGES: Final = tuple(f"{at}{part}." for at in ("", "model.") for part in ("vision_tower", "multi_modal_projector"))


def find(names: Collection[str], config: ModelConfig, path: object) -> Names:
    """The names of the checkpoint that holds `names`; raises `TensorSetError` where there is no embedding table."""
    if "token_embd.weight" in names:
        passed = (LONG_FACTORS, SHORT_FACTORS) if config.architecture == "phi3" else ()
        return Names("token_embd", "output_norm", "output", "blk.{}.", GGUF_PARTS, gguf=True, passed=passed)
    found = [at for at in _BEFORE if f"{at}embed_tokens.weight" in names]
    if len(found) != 1:
        what = " and ".join(found) + " begin a model" if found else "no tensor is an embedding table"
        raise TensorSetError(
            f"{path}: {what}; known are token_embd.weight and {', '.join(f'{at}embed_tokens.weight' for at in _BEFORE)}"
        )
    at, parts = found[0], dict(_HF_PARTS)
    if config.family.post_norms:
        parts |= _HF_POST_NORMS
    if config.num_experts and any(".block_sparse_moe." in name for name in names):
        parts["router"] = "block_sparse_moe.gate"
        expert: Mapping[str, str] | None = _MIXTRAL_EXPERT
    else:
        stacked = any(name.endswith("mlp.experts.gate_up_proj") for name in names)
        expert = None if stacked else _HF_EXPERT
    return Names(
        embedding=f"{at}embed_tokens",
        final_norm=f"{at}norm",
        head="language_model.lm_head" if at == "language_model.model." else "lm_head",
        layer=f"{at}layers.{{}}.",
        parts=MappingProxyType(parts),
        gguf=False,
        expert=expert,
        passed=() if at == "model." else _OF_IMAGES,
    )
