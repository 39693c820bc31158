"""`ModelConfig`: everything about a model that is not a tensor, and the table of families that it can come from.

A family is a row of `ARCHITECTURES`. What no row describes, or a hyper-parameter that no code reads, is an error and
not a guess: a model that runs with the wrong rotary base still writes fluent text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from .errors import MetadataError, TensorSetError, UnsupportedArchitectureError
from .gguf import GGUFFile

DEFAULT_ROPE_THETA: Final = 10_000.0
"""The format's own default where a file does not state its rotary base."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What distinguishes one Llama-like family: a row of this table is all that a new family needs.

    name: `general.architecture`. qk_permuted: the converter interleaved the rotary pairs of attn_q and attn_k, and
    loading undoes it. qkv_bias: q, k and v carry biases. rope_factors: the file may divide the rotary
    frequencies by `rope_freqs.weight` (Llama 3). qk_norm: q and k are normalised per head before the rotation.
    """

    name: str
    qk_permuted: bool
    qkv_bias: bool = False
    rope_factors: bool = False
    qk_norm: bool = False


ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        row.name: row
        for row in (
            Architecture("llama", qk_permuted=True, rope_factors=True),
            Architecture("qwen2", qk_permuted=False, qkv_bias=True),
            Architecture("qwen3", qk_permuted=False, qk_norm=True),
        )
    }
)

_READ: Final = frozenset(
    {
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
    }
)
_ONLY: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "rope.scaling.type": ("none",),
        "rope.scale_linear": (1.0,),
        "rope.scaling.factor": (1.0,),
        "attention.causal": (True,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "tensor_data_layout": ("Meta AI original pth",),
    }
)
"""Keys that would change the computation, with the values under which they do not."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The hyper-parameters of a Llama-like decoder and what its tokenizer states beside the vocabulary.

    vocab_size counts the rows of the embedding table, which may exceed `num_tokens`, the tokenizer's size: ids from
    num_tokens on are padding and must never be sampled. max_model_len: the longest sequence the model was trained for,
    in tokens. rotary_dim: how many of head_dim are rotated. eos_token_ids: every id that ends a sequence.
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

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedArchitectureError(_unknown(self.architecture))
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
        if not (self.rope_theta > 0 and self.rms_norm_eps > 0):  # also refuses NaN
            raise MetadataError(f"{self.name}: rope_theta {self.rope_theta}, rms_norm_eps {self.rms_norm_eps}")

    @property
    def family(self) -> Architecture:
        """The architecture's row."""
        return ARCHITECTURES[self.architecture]

    @property
    def q_size(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> ModelConfig:
        """Read the configuration; raises `UnsupportedArchitectureError` for a family or variation that no row
        describes, `MetadataError` for keys that are missing, of the wrong type, or contradictory."""
        arch = file.require("general.architecture", str)
        if arch not in ARCHITECTURES:
            raise UnsupportedArchitectureError(f"{file.path}: {_unknown(arch)}")
        parts = file.optional("split.count", int, 1)
        if parts > 1:
            raise TensorSetError(
                f"{file.path}: this is one of {parts} parts of a model; join them with 'llama-gguf-split --merge' first"
            )
        _refuse_unread(file, arch)
        hidden = file.require(f"{arch}.embedding_length", int)
        heads = file.require(f"{arch}.attention.head_count", int)
        head_dim = _head_dim(file, arch, hidden, heads)
        vocab_size, num_tokens = _vocabulary(file, arch)
        return cls(
            architecture=arch,
            name=file.optional("general.name", str, file.path.stem),
            hidden_size=hidden,
            intermediate_size=file.require(f"{arch}.feed_forward_length", int),
            num_layers=file.require(f"{arch}.block_count", int),
            num_heads=heads,
            num_kv_heads=file.optional(f"{arch}.attention.head_count_kv", int, heads),
            head_dim=head_dim,
            rotary_dim=file.optional(f"{arch}.rope.dimension_count", int, head_dim),
            vocab_size=vocab_size,
            num_tokens=num_tokens,
            max_model_len=file.require(f"{arch}.context_length", int),
            rope_theta=file.optional(f"{arch}.rope.freq_base", float, DEFAULT_ROPE_THETA),
            rms_norm_eps=file.require(f"{arch}.attention.layer_norm_rms_epsilon", float),
            tie_word_embeddings="output.weight" not in file.tensors,
            bos_token_id=_token_id(file, "bos", num_tokens),
            eos_token_ids=_end_ids(file, num_tokens),
            add_bos=file.optional(
                "tokenizer.ggml.add_bos_token", bool, file.optional("tokenizer.ggml.model", str, "gpt2") == "llama"
            ),
            chat_template=file.optional("tokenizer.chat_template", str, "") or None,
        )


def _unknown(arch: str) -> str:
    return f"architecture '{arch}' is not supported; supported: {', '.join(ARCHITECTURES)}"


def _refuse_unread(file: GGUFFile, arch: str) -> None:
    for key in file:
        if not key.startswith(f"{arch}."):
            continue
        suffix = key.removeprefix(f"{arch}.")
        if suffix in _ONLY:
            if file[key] not in _ONLY[suffix]:
                raise UnsupportedArchitectureError(f"{file.path}: {key} = {file[key]!r} is not supported")
        elif suffix not in _READ:
            raise UnsupportedArchitectureError(
                f"{file.path}: metadata key '{key}' = {file[key]!r} is not understood and may change what is computed"
            )


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
