"""Weights in the form that the decoder computes with, whatever file they come from.

Quantised rows stay quantised: fusing q, k, v into one matrix, and undoing a converter's interleaving of rotary pairs,
only move whole rows. The set of tensors is checked both ways: what a layer needs must be there, once and of the right
shape, and what no layer takes is an error, because a tensor that is ignored is a model that computes something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .config import ModelConfig
from .gguf import GGUFFile
from .source import TensorSource

if TYPE_CHECKING:
    from .parallel import Shard

Progress = Callable[[int, int], None]
"""(tensors read, tensors in all)."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One matrix. shape: (out_features, in_features) in weights. scheme 'unquantized': data has that shape, in the
    activations' dtype. Any other scheme: data is (out_features, bytes a row) uint8."""

    data: Tensor
    scheme: str
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """A choice of feed-forward parts, dense in the activations' dtype. router: (experts, hidden). gate_up: (experts,
    2 * expert_size, hidden), rows of the gate, then of up. down: (experts, hidden, expert_size)."""

    router: Weight
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer. qkv: rows of q, then k, then v. gate_up: rows of the gate, then of up. Norms and biases: dense
    vectors, norms in fp32 and complete (Gemma's 1 + w), biases in the activations' dtype; None where the family has
    none. A layer has gate_up and down, or experts."""

    attn_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    ffn_norm: Tensor
    gate_up: Weight | None
    down: Weight | None
    o_bias: Tensor | None = None
    post_attn_norm: Tensor | None = None
    post_ffn_norm: Tensor | None = None
    experts: ExpertWeights | None = None

    def linears(self) -> dict[str, tuple[Weight, Tensor | None]]:
        """Every linear map but the experts' own: matrix and bias, by name."""
        found = {"qkv": (self.qkv, self.qkv_bias), "o": (self.o, self.o_bias)}
        if self.experts is not None:
            found["router"] = (self.experts.router, None)
        if self.gate_up is not None and self.down is not None:
            found |= {"gate_up": (self.gate_up, None), "down": (self.down, None)}
        return found

    def norms(self) -> dict[str, Tensor]:
        """Every norm that there is, by name."""
        names = ("attn_norm", "q_norm", "k_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """A whole model. head is the very object `embedding` where the two are tied. rope_factors: (rotary_dim / 2,) fp32
    divisors of the rotary frequencies, or None."""

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Weight
    rope_factors: Tensor | None


def load_weights(
    source: TensorSource | GGUFFile,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    quantization: str | None = None,
    shard: Shard | None = None,
) -> ModelWeights:
    """Read every tensor of `source` on to `device`; dense matrices and biases become `dtype`, the activations' dtype.

    progress: called behind each tensor. quantization: what the dense matrices of layers are quantised to (`int8`,
    `int4` or `fp8`, see `quantize`); embedding, head, router and experts stay as they are. A checkpoint that is
    quantised already is read as its `config.quantization` says (`checkpoints`). shard: the part to keep, of a model of
    which `config` is the whole; of plain numbers and blocks nothing else is read.

    A fused group whose parts are of different types (a q8_0 v beside q4_0 q and k) is kept dense, in `dtype`, which is
    what the ops compute with such a weight anyway; so are quantised experts; one warning says how many. A head in the
    file is used although the configuration ties it to the embedding, unless the two are equal; a warning says so.

    Raises `TensorSetError` for tensors that are missing, left over or of the wrong shape and for an incomplete group,
    `UnsupportedTensorError` for types and kinds of tensors that no op computes with, `UnsupportedQuantizationError` for
    a configuration of quantised weights that is not read, and for a quantization that would change nothing.
    """
    from .loader import Loader  # which needs the classes above

    if isinstance(source, GGUFFile):
        from .gguf_source import GGUFSource

        source = GGUFSource(source)
    return Loader(source, config, device, dtype, progress=progress, quantization=quantization, shard=shard).load()


def unpermute(rows: Tensor, heads: int) -> Tensor:
    """A view in which each head's rows go from interleaved pairs (0, d/2, 1, d/2 + 1, ...) to order (0, 1, ..., d - 1).

    rows: (heads * d, anything), contiguous, weights or bytes of quantised rows. Returns (heads, 2, d / 2, anything).
    Source of the order: the llama conversion of llama.cpp, which swaps the axes of (heads, 2, d / 2, ...).
    """
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2)
