"""`ModelConfig` from a config.json as transformers writes it, of version 4 or 5.

Every key is either read, known to change nothing in inference, or an error: an ignored hyper-parameter is a model that
computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

from .config import ModelConfig, unknown
from .errors import MetadataError, UnsupportedArchitectureError
from .families import BY_MODEL_TYPE, FULL, SLIDING, Architecture
from .rope import Rope, Yarn, rope_type, scaling

T = TypeVar("T")

_READ: Final = frozenset(
    {
        *("model_type", "architectures", "quantization_config", "tie_word_embeddings", "bos_token_id", "eos_token_id"),
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "rms_norm_eps"),
        *("max_position_embeddings", "original_max_position_embeddings"),
        *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    }
)
_HARMLESS: Final = frozenset(
    {
        *("transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range", "pad_token_id"),
        *("attention_dropout", "resid_pdrop", "embd_pdrop", "output_attentions", "output_hidden_states", "return_dict"),
        *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "chunk_size_feed_forward"),
        *("pretraining_tp", "cache_implementation", "auto_map", "id2label", "label2id", "is_llama_config"),
        *("transformers.js_config", "tokenizer_class", "unsloth_fixed", "unsloth_version", "problem_type"),
    }
)
"""Keys of training, of output formats, and of one program's own bookkeeping."""

_ONLY: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "mlp_bias": (False,),
        "use_bidirectional_attention": (False,),
        "rope_interleaved": (False,),
        "is_encoder_decoder": (False,),
    }
)
"""Keys that would change the computation, with the values under which they do not."""

_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({"rms_norm_eps": 1e-6, "tie_word_embeddings": False})
_GELU: Final = "gelu_pytorch_tanh"


def read(stated: Mapping[str, Any], name: str) -> ModelConfig:
    """See `ModelConfig.from_hf`."""
    text = stated.get("text_config")
    whole = text is None
    if not (whole or isinstance(text, Mapping)):
        raise MetadataError(f"{name}: text_config is {text!r}, not a dictionary")
    inner: Mapping[str, Any] = stated if text is None else text
    family = _family(stated, inner, name)
    _refuse_unread(inner, family, name)
    outer = {k: stated[k] for k in ("tie_word_embeddings", "bos_token_id", "eos_token_id") if stated.get(k) is not None}
    keys = _Keys({**_DEFAULTS, **family.defaults, **outer, **_given(inner)}, name)
    keys.values["quantization_config"] = stated.get("quantization_config") or inner.get("quantization_config")
    return _build(family, keys, inner)


class _Keys:
    """The keys of a config.json, typed."""

    def __init__(self, values: dict[str, Any], name: str) -> None:
        self.values = values
        self.name = name

    def require(self, key: str, kind: type[T]) -> T:
        value = self.values.get(key)
        if value is None:
            raise MetadataError(f"{self.name}: key '{key}' is missing")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise MetadataError(f"{self.name}: key '{key}' is {value!r}, not a {kind.__name__}")
        return value

    def optional(self, key: str, kind: type[T], default: T) -> T:
        return default if self.values.get(key) is None else self.require(key, kind)


def _given(inner: Mapping[str, Any]) -> dict[str, Any]:
    """What is stated. A null counts for the keys in which it says 'none', and as not stated for all others."""
    says_none = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    return {k: v for k, v in inner.items() if v is not None or k in says_none}


def _family(stated: Mapping[str, Any], inner: Mapping[str, Any], name: str) -> Architecture:
    kinds = [m["model_type"] for m in (inner, stated) if m.get("model_type") is not None]
    if not kinds:
        raise MetadataError(f"{name}: key 'model_type' is missing")
    for kind in kinds:
        if kind not in BY_MODEL_TYPE:
            raise UnsupportedArchitectureError(f"{name}: {unknown(kind, BY_MODEL_TYPE)}")
    heads = stated.get("architectures") or ()
    if heads and not any(h.endswith(("ForCausalLM", "ForConditionalGeneration")) for h in heads):
        raise UnsupportedArchitectureError(f"{name}: {heads[0]} does not predict tokens; a ...ForCausalLM is needed")
    return BY_MODEL_TYPE[kinds[0]]


def _refuse_unread(inner: Mapping[str, Any], family: Architecture, name: str) -> None:
    known = _READ | _HARMLESS | set(family.defaults) | set(family.reads)
    for key, value in inner.items():
        if key in _ONLY:
            if value is not None and value not in _ONLY[key]:
                raise UnsupportedArchitectureError(f"{name}: {key} = {value!r} is not supported")
        elif key == "num_local_experts" and "num_experts" in family.defaults:
            continue  # another spelling
        elif key not in known and not key.startswith("_") and value not in (None, False, 0, "", [], {}):
            raise UnsupportedArchitectureError(
                f"{name}: key '{key}' = {value!r} is not understood and may change what is computed"
            )


def _build(family: Architecture, keys: _Keys, inner: Mapping[str, Any]) -> ModelConfig:
    stated, name = keys.values, keys.name
    _check_activation(family, stated, name)
    heads, hidden = keys.require("num_attention_heads", int), keys.require("hidden_size", int)
    layers, vocab_size = keys.require("num_hidden_layers", int), keys.require("vocab_size", int)
    if heads <= 0 or (stated.get("head_dim") is None and hidden % heads):
        raise MetadataError(f"{name}: hidden_size {hidden} is not a multiple of its {heads} heads")
    head_dim = keys.optional("head_dim", int, hidden // heads)
    windows = family.windows(stated, layers)
    rope, local, rotated = _ropes(family, keys, inner, bool(windows))
    scalar = keys.optional("query_pre_attn_scalar", float, 0.0)
    return ModelConfig(
        architecture=family.name,
        name=name,
        hidden_size=hidden,
        intermediate_size=keys.require("intermediate_size", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.optional("num_key_value_heads", int, heads),
        head_dim=head_dim,
        rotary_dim=int(head_dim * rotated),
        vocab_size=vocab_size,
        num_tokens=vocab_size,
        max_model_len=_context(keys, rope),
        rope_theta=rope.theta,
        rms_norm_eps=keys.require("rms_norm_eps", float),
        tie_word_embeddings=keys.require("tie_word_embeddings", bool),
        bos_token_id=_ids(keys, "bos_token_id", vocab_size)[0],
        eos_token_ids=tuple(i for i in _ids(keys, "eos_token_id", vocab_size) if i is not None),
        add_bos=False,
        chat_template=None,
        rope_scaling=rope.scaling,
        local_rope=local,
        windows=windows,
        softmax_scale=scalar**-0.5 if scalar > 0 else None,
        attention_softcap=keys.optional("attn_logit_softcapping", float, 0.0),
        logit_softcap=keys.optional("final_logit_softcapping", float, 0.0),
        attention_bias=keys.optional("attention_bias", bool, False),
        quantization=stated["quantization_config"],
        **_experts(family, keys, layers),
    )


def _check_activation(family: Architecture, stated: Mapping[str, Any], name: str) -> None:
    """Gemma's `hidden_act` is a relic that says 'gelu' and means the tanh form; `hidden_activation` decides."""
    found = stated.get("hidden_activation") if family.gelu else stated.get("hidden_act")
    wanted = _GELU if family.gelu else "silu"
    if found not in (None, wanted):
        raise UnsupportedArchitectureError(f"{name}: activation {found!r} is not supported for {family.name}: {wanted}")


def _experts(family: Architecture, keys: _Keys, layers: int) -> dict[str, Any]:
    stated = keys.values
    if "num_experts_per_tok" not in family.defaults:
        return {}
    count = keys.require("num_local_experts" if "num_local_experts" in stated else "num_experts", int)
    step, dense = int(stated.get("decoder_sparse_step", 1)), tuple(stated.get("mlp_only_layers", ()))
    if step <= 0 or not all(isinstance(i, int) for i in dense):
        raise MetadataError(f"{keys.name}: decoder_sparse_step {step}, mlp_only_layers {dense}")
    return {
        "num_experts": count,
        "experts_per_token": keys.require("num_experts_per_tok", int),
        "expert_size": keys.require(
            "moe_intermediate_size" if "moe_intermediate_size" in stated else "intermediate_size", int
        ),
        "renormalize": keys.optional("norm_topk_prob", bool, True),
        "dense_layers": tuple(i for i in range(layers) if i in dense or (i + 1) % step),
    }


def _ids(keys: _Keys, key: str, vocab_size: int) -> tuple[int | None, ...]:
    """One id or several; each must be a row of the table."""
    value = keys.values.get(key)
    if value is None:
        return (None,)
    found = tuple(value) if isinstance(value, list) else (value,)
    for token in found:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise MetadataError(f"{keys.name}: {key} is {token!r}, outside the vocabulary of {vocab_size}")
    return found or (None,)


def _context(keys: _Keys, rope: Rope) -> int:
    """The trained context; YaRN's checkpoints state the one from before."""
    positions = keys.require("max_position_embeddings", int)
    if not isinstance(rope.scaling, Yarn):
        return positions
    return max(positions, int(rope.scaling.factor * rope.scaling.original_max_position_embeddings))


def _ropes(
    family: Architecture, keys: _Keys, inner: Mapping[str, Any], windowed: bool
) -> tuple[Rope, Rope | None, float]:
    """Rotary positions of layers without and with a window, and the share of a head that is rotated."""
    name, new, old = keys.name, inner.get("rope_parameters"), inner.get("rope_scaling")
    if new and old and new != old:
        raise MetadataError(f"{name}: rope_parameters {new!r} and rope_scaling {old!r} differ; state one")
    stated = dict(new or old or {})
    nested = {FULL, SLIDING} & set(stated)
    if nested and (set(stated) - {FULL, SLIDING} or None in stated.values()):
        raise UnsupportedArchitectureError(f"{name}: rope_parameters {stated!r} are not understood")
    parts = {k: dict(stated[k]) for k in nested} if nested else {FULL: stated}
    local = parts.pop(SLIDING, None)
    if local is None and family.local_theta is not None:
        local = {"rope_theta": keys.optional("rope_local_base_freq", float, family.local_theta)}
    theta = keys.optional("rope_theta", float, family.theta)
    full, share = _rope(parts.get(FULL, {}), theta, family, keys)
    if local is None or not windowed:
        return full, None, share
    beside, other = _rope(local, theta if family.local_theta is None else family.local_theta, family, keys)
    if other != share:
        raise UnsupportedArchitectureError(
            f"{name}: layers that rotate {share} and {other} of a head are not supported"
        )
    return full, None if beside == full else beside, share


def _rope(stated: dict[str, Any], theta: float, family: Architecture, keys: _Keys) -> tuple[Rope, float]:
    where, positions = keys.name, keys.require("max_position_embeddings", int)
    own = _Keys({**stated}, f"{where}: rope_parameters")
    kind = rope_type(stated, where)
    if kind in ("yarn", "longrope", "su", "llama3") and "original_max_position_embeddings" in keys.values:
        stated = {**stated, "original_max_position_embeddings": keys.values["original_max_position_embeddings"]}
    if kind == "yarn" and family.fused:  # what Phi-3 called longrope for a while
        stated = {**{k: v for k, v in stated.items() if k != "type"}, "rope_type": "longrope"}
    share = own.optional("partial_rotary_factor", float, keys.optional("partial_rotary_factor", float, 1.0))
    found = scaling(stated, max_positions=positions, where=where)
    return Rope(own.optional("rope_theta", float, theta), found), share
