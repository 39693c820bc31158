"""Tiny random models of every family, made and written by transformers, which is the oracle of their logits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import Decoder
from rapid_llm.models.safetensors import SafetensorsFolder
from rapid_llm.models.weights import ModelWeights, load_weights
from tests.models.paged import PagedRunner

CPU = torch.device("cpu")
VOCAB, WINDOW = 96, 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_GEMMA = {
    "head_dim": 32,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": 3.0,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 24}
_DIVISORS = {"short_factor": [1.0, 1.5, 2.0, 4.0, 5.0, 6.0], "long_factor": [2.0, 3.0, 5.0, 8.0, 9.0, 11.0]}
_PHI = {"sliding_window": 12, "original_max_position_embeddings": 64}
_LONG = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75, **_DIVISORS}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "head_dim": 24, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", _QWEN),
    "qwen3": ("Qwen3", {**_QWEN, "head_dim": 32, "attention_bias": True}),
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3Text", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3", {**_PHI, "rope_parameters": _LONG}),
    "mixtral": ("Mixtral", {"sliding_window": WINDOW, "num_local_experts": 6}),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3-moe-raw": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": False, "decoder_sparse_step": 2}),
}
"""transformers' class, and what of its configuration is not the common one."""


@dataclass(frozen=True)
class Made:
    """A model of transformers in float32, eager attention, and the folder that it was written to."""

    model: Any
    folder: Path

    @property
    def stated(self) -> dict[str, Any]:
        """The config.json."""
        stated: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return stated

    def logits(self, ids: list[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """(len(ids), vocab) by transformers in `dtype`, all at once."""
        self.model.to(dtype)
        try:
            with torch.no_grad():
                found: torch.Tensor = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        finally:
            self.model.float()
        return found


def _new(family: str, **own: Any) -> Any:
    name = FAMILIES[family][0]
    config = getattr(transformers, f"{name}Config")(**own, attn_implementation="eager", experts_implementation="eager")
    kind = "Gemma3" if name == "Gemma3Text" else name
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def varied(made: Made, **changes: Any) -> Any:
    """A model of transformers with the weights of `made` and another configuration."""
    family = next(f for f, (name, _) in FAMILIES.items() if name == type(made.model.config).__name__[: -len("Config")])
    model = _new(family, **{**made.stated, **changes})
    model.load_state_dict(made.model.state_dict())
    return model


def make(folder: Path, family: str, seed: int = 0, **changes: Any) -> Made:
    """Write a random model in shards; every vector and matrix matters, and scores differ enough for attention to."""
    model = _new(family, **{**_COMMON, **FAMILIES[family][1], **changes})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for where, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                centre = 1.0 if "norm" in where and "gemma" not in family else 0.0
                weight.copy_(centre + 0.2 * noise)
            else:
                weight.copy_(noise * (1.5 if "embed" in where else weight.shape[-1] ** -0.5))
    model.save_pretrained(folder, max_shard_size="60KB")
    return Made(model, folder)


def weights(made: Made, config: ModelConfig | None = None) -> ModelWeights:
    """Ours, from the folder, in float32."""
    of = ModelConfig.from_hf(made.stated) if config is None else config
    return load_weights(SafetensorsFolder(made.folder), of, device=CPU, dtype=torch.float32)


def decoder(made: Made, *, max_model_len: int | None = None) -> Decoder:
    """Ours, from the folder, in float32."""
    config = ModelConfig.from_hf(made.stated)
    return Decoder(config, weights(made, config), device=CPU, dtype="float32", max_model_len=max_model_len)


def stepwise(ours: Decoder, ids: list[int], prompt: int) -> torch.Tensor:
    """(len(ids), vocab): the first `prompt` ids at once, then one by one."""
    runner = PagedRunner(ours, 1, len(ids))
    parts = [runner.logits([(0, ids[:prompt])]), *(runner.logits([(0, [token])]) for token in ids[prompt:])]
    return torch.cat(parts)


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Ids of the common vocabulary."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
