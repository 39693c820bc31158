"""`ModelConfig`: everything about a model that is not a tensor, from a GGUF file or from a config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import MetadataError, UnsupportedArchitectureError
from .families import ARCHITECTURES, Architecture
from .gguf import GGUFFile
from .rope import UNSCALED, Rope, Scaling


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The hyper-parameters of a decoder and what its tokenizer states beside the vocabulary.

    vocab_size counts the rows of the embedding table, which may exceed `num_tokens`, the tokenizer's size: ids from
    num_tokens on are padding and must never be sampled. max_model_len: the longest sequence the model was trained for,
    in tokens. rotary_dim: how many of head_dim are rotated. eos_token_ids: every id that ends a sequence.
    tie_word_embeddings: the output head is the embedding; False says that a head of its own must be there.

    local_rope: rotary positions of the layers with a window, where they have their own. windows: each layer's window,
    in tokens, the query's own included; 0 for none, and () where no layer has one. softmax_scale: factor on scores,
    None for 1 / sqrt(head_dim). attention_softcap, logit_softcap: c of c * tanh(x / c), 0 for none. attention_bias: q,
    k, v and o carry biases. num_experts: 0 for a dense model; experts_per_token are chosen for each token, each of
    expert_size features; renormalize: their weights are divided by their sum. dense_layers: layers of intermediate_size
    without experts. quantization: how a checkpoint's weights are stored, as its config.json states it.
    """

    architecture: str
    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab_size: int
    num_tokens: int
    max_model_len: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None
    rope_scaling: Scaling = UNSCALED
    local_rope: Rope | None = None
    windows: tuple[int, ...] = ()
    softmax_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    attention_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    renormalize: bool = True
    dense_layers: tuple[int, ...] = ()
    quantization: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedArchitectureError(f"{self.name}: {unknown(self.architecture, ARCHITECTURES)}")
        for field in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, field) <= 0:
                raise MetadataError(f"{self.name}: {field} is {getattr(self, field)}; it must be positive")
        if self.max_model_len <= 0 or self.vocab_size <= 0:
            raise MetadataError(f"{self.name}: max_model_len {self.max_model_len}, vocab_size {self.vocab_size}")
        if self.num_heads % self.num_kv_heads:
            raise MetadataError(
                f"{self.name}: {self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise MetadataError(f"{self.name}: rotary_dim {self.rotary_dim} is not even and within {self.head_dim}")
        if self.family.qk_permuted and self.rotary_dim != self.head_dim:
            raise UnsupportedArchitectureError(
                f"{self.name}: architecture {self.architecture} with rotary_dim {self.rotary_dim} of {self.head_dim}: "
                "how its converter orders such rows is not known"
            )
        if not (self.rope_theta > 1 and self.rms_norm_eps > 0):  # also refuses NaN
            raise MetadataError(f"{self.name}: rope_theta {self.rope_theta}, rms_norm_eps {self.rms_norm_eps}")
        self._check_attention()
        self._check_experts()

    def _check_attention(self) -> None:
        if self.windows and (len(self.windows) != self.num_layers or min(self.windows) < 0):
            raise MetadataError(f"{self.name}: windows {self.windows} of {self.num_layers} layers")
        if self.local_rope is not None and not self.local_rope.theta > 1:
            raise MetadataError(f"{self.name}: the rotary base of layers with a window is {self.local_rope.theta}")
        for field in ("attention_softcap", "logit_softcap"):
            if not getattr(self, field) >= 0:
                raise MetadataError(f"{self.name}: {field} is {getattr(self, field)}; it is positive, or 0 for none")
        if self.softmax_scale is not None and not self.softmax_scale > 0:
            raise MetadataError(f"{self.name}: softmax_scale is {self.softmax_scale}; it must be positive")
        for rope in filter(None, (self.rope, self.local_rope)):
            try:
                rope.frequencies(self.rotary_dim, self.max_model_len)
            except ValueError as error:
                raise MetadataError(f"{self.name}: rotary scaling of {self.rotary_dim // 2} pairs: {error}") from None

    def _check_experts(self) -> None:
        if self.num_experts == 0:
            return
        if not 0 < self.experts_per_token <= self.num_experts or self.expert_size <= 0:
            raise MetadataError(
                f"{self.name}: {self.experts_per_token} of {self.num_experts} experts of {self.expert_size} features"
            )
        if self.family.gelu or self.family.fused:
            raise UnsupportedArchitectureError(f"{self.name}: {self.architecture} with experts is not supported")

    @property
    def family(self) -> Architecture:
        """The architecture's row."""
        return ARCHITECTURES[self.architecture]

    @property
    def rope(self) -> Rope:
        """Rotary positions, of all layers but those that `local_rope` is for."""
        return Rope(self.rope_theta, self.rope_scaling)

    @property
    def scale(self) -> float:
        """Factor on the scores of attention."""
        return float(self.head_dim**-0.5) if self.softmax_scale is None else self.softmax_scale

    @property
    def q_size(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int:
        """How many keys a query of that layer sees, its own included; 0: all."""
        return self.windows[layer] if self.windows else 0

    def has_experts(self, layer: int) -> bool:
        """Whether that layer's feed-forward part is a choice of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> ModelConfig:
        """Read the configuration; raises `UnsupportedArchitectureError` for a family or variation that no row
        describes, `MetadataError` for keys that are missing, of the wrong type, or contradictory."""
        from .gguf_config import read

        return read(file)

    @classmethod
    def from_hf(cls, stated: Mapping[str, Any], *, name: str = "config.json") -> ModelConfig:
        """From the contents of a config.json, of a language model or of one that holds it as `text_config`. name: what
        to call the model, in errors too. A config.json says nothing of templates and little of end ids: `add_bos` is
        False, `chat_template` None and `num_tokens` the whole table. Raises as `from_gguf` does."""
        from .hf_config import read

        return read(stated, name)


def unknown(architecture: object, known: Iterable[str]) -> str:
    """What to say of a family that no row describes."""
    return f"architecture {architecture!r} is not supported; supported: {', '.join(known)}"
