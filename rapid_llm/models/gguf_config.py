"""`ModelConfig` from a GGUF file's metadata. What a key means is what llama.cpp's converter and loader agree on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from .config import ModelConfig, unknown
from .errors import MetadataError, TensorSetError, UnsupportedArchitectureError
from .families import ARCHITECTURES, SLIDING, Architecture
from .gguf import GGUFFile
from .rope import LongRope, Rope, Scaling, scaling

DEFAULT_ROPE_THETA: Final = 10_000.0
"""The format's own default where a file does not state its rotary base."""

LONG_FACTORS: Final = "rope_factors_long.weight"
SHORT_FACTORS: Final = "rope_factors_short.weight"
"""Tensors that belong to the configuration: LongRoPE's divisors."""

_READ: Final = frozenset(
    {
        *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "attention.scale"),
        *("rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    }
)
_WINDOW_KEYS: Final = ("attention.sliding_window", "attention.sliding_window_pattern")
_EXPERT_KEYS: Final = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_OF_FAMILY: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "llama": _EXPERT_KEYS,
        "qwen3moe": _EXPERT_KEYS,
        "gemma2": (*_WINDOW_KEYS, "attn_logit_softcapping", "final_logit_softcapping"),
        "gemma3": (*_WINDOW_KEYS, "final_logit_softcapping", "rope.freq_base_swa"),
        "phi3": ("attention.sliding_window",),
    }
)
_ONLY: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "expert_weights_norm": (True,),
        "expert_weights_scale": (1.0,),
        "expert_gating_func": (1,),  # softmax
        "rope.scaling.finetuned": (True, False),
        "rope.scaling.yarn_ext_factor": (1.0,),
        "tensor_data_layout": ("Meta AI original pth",),
    }
)
"""Keys that would change the computation, with the values under which they do not."""

_WIDE: Final[Mapping[str, int]] = MappingProxyType({"gemma2": 46, "gemma3": 62})
"""The number of layers by which llama.cpp tells the one size of a family whose scores are scaled by 1 / sqrt(hidden /
heads), which its files do not say."""


def read(file: GGUFFile) -> ModelConfig:
    """See `ModelConfig.from_gguf`."""
    arch = file.require("general.architecture", str)
    if arch not in ARCHITECTURES or not ARCHITECTURES[arch].in_gguf:
        raise UnsupportedArchitectureError(
            f"{file.path}: {unknown(arch, (n for n, row in ARCHITECTURES.items() if row.in_gguf))}"
        )
    parts = file.optional("split.count", int, 1)
    if parts > 1:
        raise TensorSetError(
            f"{file.path}: this is one of {parts} parts of a model; join them with 'llama-gguf-split --merge' first"
        )
    _refuse_unread(file, arch)
    hidden = file.require(f"{arch}.embedding_length", int)
    heads = file.require(f"{arch}.attention.head_count", int)
    layers = file.require(f"{arch}.block_count", int)
    head_dim = _head_dim(file, arch, hidden, heads)
    vocab_size, num_tokens = _vocabulary(file, arch)
    windows = _windows(file, ARCHITECTURES[arch], layers)
    rope = Rope(file.optional(f"{arch}.rope.freq_base", float, DEFAULT_ROPE_THETA), _scaling(file, arch))
    return ModelConfig(
        architecture=arch,
        name=file.optional("general.name", str, file.path.stem),
        hidden_size=hidden,
        intermediate_size=file.require(f"{arch}.feed_forward_length", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=file.optional(f"{arch}.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        rotary_dim=file.optional(f"{arch}.rope.dimension_count", int, head_dim),
        vocab_size=vocab_size,
        num_tokens=num_tokens,
        max_model_len=file.require(f"{arch}.context_length", int),
        rope_theta=rope.theta,
        rms_norm_eps=file.require(f"{arch}.attention.layer_norm_rms_epsilon", float),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=_token_id(file, "bos", num_tokens),
        eos_token_ids=_end_ids(file, num_tokens),
        add_bos=file.optional(
            "tokenizer.ggml.add_bos_token", bool, file.optional("tokenizer.ggml.model", str, "gpt2") == "llama"
        ),
        chat_template=file.optional("tokenizer.chat_template", str, "") or None,
        rope_scaling=rope.scaling,
        local_rope=_local_rope(file, ARCHITECTURES[arch], rope, windows),
        windows=windows,
        softmax_scale=_softmax_scale(file, arch, layers, hidden, heads),
        attention_softcap=file.optional(f"{arch}.attn_logit_softcapping", float, 0.0),
        logit_softcap=file.optional(f"{arch}.final_logit_softcapping", float, 0.0),
        **_experts(file, arch),
    )


def _refuse_unread(file: GGUFFile, arch: str) -> None:
    of_family = _OF_FAMILY.get(arch, ())
    for key in file:
        if not key.startswith(f"{arch}."):
            continue
        suffix = key.removeprefix(f"{arch}.")
        if suffix in _READ or suffix in of_family:
            continue
        if suffix not in _ONLY:
            raise UnsupportedArchitectureError(
                f"{file.path}: metadata key '{key}' = {file[key]!r} is not understood and may change what is computed"
            )
        if file[key] not in _ONLY[suffix]:
            raise UnsupportedArchitectureError(f"{file.path}: {key} = {file[key]!r} is not supported")


def _head_dim(file: GGUFFile, arch: str, hidden: int, heads: int) -> int:
    if heads <= 0 or (f"{arch}.attention.key_length" not in file and hidden % heads):
        raise MetadataError(f"{file.path}: {arch}.embedding_length {hidden} is not a multiple of its {heads} heads")
    head_dim = file.optional(f"{arch}.attention.key_length", int, hidden // heads)
    value_dim = file.optional(f"{arch}.attention.value_length", int, head_dim)
    if value_dim != head_dim:
        raise UnsupportedArchitectureError(
            f"{file.path}: key heads of {head_dim} and value heads of {value_dim} differ"
        )
    return head_dim


def _scaling(file: GGUFFile, arch: str) -> Scaling:
    """rope.scaling.* under the names that a config.json gives them; the older rope.scale_linear says linear."""
    at, where = f"{arch}.rope.scaling", str(file.path)
    context = file.require(f"{arch}.context_length", int)
    if arch == "phi3" and not {LONG_FACTORS, SHORT_FACTORS}.isdisjoint(file.tensors):
        return _longrope(file, at, context)
    kind = file.optional(f"{at}.type", str, "none")
    factor = file.optional(f"{at}.factor", float, file.optional(f"{arch}.rope.scale_linear", float, 1.0))
    if kind == "none":
        kind = "default" if factor == 1.0 else "linear"
        if f"{at}.type" in file and factor != 1.0:
            raise MetadataError(f"{where}: {at}.type is none and the factor {factor}")
    more = file.optional(f"{at}.yarn_attn_factor", float, 1.0) * file.optional(f"{at}.attn_factor", float, 1.0)
    if kind in ("default", "linear"):
        if more != 1.0:
            raise UnsupportedArchitectureError(f"{where}: {at}.attn_factor = {more} without YaRN is not supported")
        return scaling(
            {"rope_type": kind, **({"factor": factor} if kind == "linear" else {})}, max_positions=context, where=where
        )
    if kind != "yarn":
        raise UnsupportedArchitectureError(f"{where}: {at}.type = {kind!r} is not supported; none, linear and yarn are")
    stated: dict[str, Any] = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": file.require(f"{at}.original_context_length", int),
        "beta_fast": file.optional(f"{at}.yarn_beta_fast", float, 32.0),
        "beta_slow": file.optional(f"{at}.yarn_beta_slow", float, 1.0),
    }
    made = scaling(stated, max_positions=context, where=where)
    if more != 1.0:  # on top of YaRN's own
        made = scaling({**stated, "attention_factor": made.magnitude * more}, max_positions=context, where=where)
    return made


def _longrope(file: GGUFFile, at: str, context: int) -> LongRope:
    """Phi-3: the divisors are tensors, the rest is metadata."""
    lists = {}
    for field, name in (("short_factor", SHORT_FACTORS), ("long_factor", LONG_FACTORS)):
        info = file.tensors.get(name)
        if info is None or info.type != "F32":
            raise TensorSetError(f"{file.path}: tensor '{name}' is missing or not F32; convert the model again")
        lists[field] = file.data(name).reshape(-1).view(np.float32).tolist()
    stated = {
        "rope_type": "longrope",
        **lists,
        "original_max_position_embeddings": file.require(f"{at}.original_context_length", int),
        "attention_factor": file.optional(f"{at}.attn_factor", float, 1.0),
    }
    made = scaling(stated, max_positions=context, where=str(file.path))
    if not isinstance(made, LongRope):
        raise TypeError(f"a statement of LongRoPE was read as {type(made).__name__}")
    return made


def _windows(file: GGUFFile, family: Architecture, layers: int) -> tuple[int, ...]:
    """As the family's rule has it; the pattern may be stated as a number, or layer by layer."""
    arch = family.name
    stated: dict[str, Any] = dict(family.defaults)
    stated["sliding_window"] = file.optional(f"{arch}.attention.sliding_window", int, 0)
    key = f"{arch}.attention.sliding_window_pattern"
    if key in file and type(file[key]) is tuple:
        stated["layer_types"] = [SLIDING if windowed else "" for windowed in file.require(key, tuple)]
    elif key in file:
        stated["sliding_window_pattern"] = file.require(key, int)
    return family.windows(stated, layers)


def _local_rope(file: GGUFFile, family: Architecture, rope: Rope, windows: tuple[int, ...]) -> Rope | None:
    if family.local_theta is None or not windows:
        return None
    local = Rope(file.optional(f"{family.name}.rope.freq_base_swa", float, family.local_theta))
    return None if local == rope else local


def _softmax_scale(file: GGUFFile, arch: str, layers: int, hidden: int, heads: int) -> float | None:
    stated = file.optional(f"{arch}.attention.scale", float, 0.0)
    if stated != 0.0:
        return stated
    return float((hidden / heads) ** -0.5) if _WIDE.get(arch) == layers else None


def _experts(file: GGUFFile, arch: str) -> dict[str, Any]:
    """Mixtral is an architecture 'llama' with experts, all of whose layers have them."""
    count = file.optional(f"{arch}.expert_count", int, 0)
    if count == 0 or "expert_count" not in _OF_FAMILY.get(arch, ()):
        return {}
    wide = file.require(f"{arch}.feed_forward_length", int)
    return {
        "num_experts": count,
        "experts_per_token": file.require(f"{arch}.expert_used_count", int),
        "expert_size": file.optional(f"{arch}.expert_feed_forward_length", int, wide),
    }


def _vocabulary(file: GGUFFile, arch: str) -> tuple[int, int]:
    if "token_embd.weight" not in file.tensors:
        raise TensorSetError(f"{file.path}: tensor 'token_embd.weight' is missing; convert the model again")
    rows = file.tensors["token_embd.weight"].shape[0]
    tokens = len(file.optional("tokenizer.ggml.tokens", tuple, ())) or rows
    stated = file.optional(f"{arch}.vocab_size", int, rows)
    if tokens > rows or stated > rows:
        raise MetadataError(
            f"{file.path}: token_embd.weight has {rows} rows for {tokens} tokens and {arch}.vocab_size {stated}"
        )
    return rows, tokens


def _token_id(file: GGUFFile, role: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in file:
        return None
    value = file.require(key, int)
    if not 0 <= value < num_tokens:
        raise MetadataError(f"{file.path}: {key} is {value}, outside the vocabulary of {num_tokens}")
    return value


def _end_ids(file: GGUFFile, num_tokens: int) -> tuple[int, ...]:
    """eos, end of turn, end of message: each ends a sequence."""
    ids = (_token_id(file, role, num_tokens) for role in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(i for i in ids if i is not None))
