"""Random weights for a configuration, made on the device that computes with them: nothing is read, nothing is copied.

They are as large and as many as the real ones, so that what they cost is what the real ones cost; what they say is
noise of a size under which activations stay as large as a trained model's.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import row_bytes

from .config import ModelConfig
from .quant import UNQUANTIZED
from .quantize import QUANTIZATIONS, quantize, scheme_for
from .shapes import matrices, vectors
from .weights import ExpertWeights, LayerWeights, ModelWeights, Weight

STD: Final = 0.02
"""Of every matrix: what the models of these families are initialised with."""


def random_weights(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0, *, quantization: str | None = None
) -> ModelWeights:
    """Weights of `config` on `device`: matrices in `dtype`, normal with deviation `STD`; norms of one, in fp32.

    seed: the same seed, device and dtype give the same weights. quantization: what the matrices of layers are quantised
    to, as in `load_weights`. The head is the embedding where the configuration ties them.

    Raises `ValueError` for an unknown quantization, and torch's error where the device has no room.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization={quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    return _Maker(config, device, dtype, seed, quantization).make()


def weight_bytes(config: ModelConfig, dtype: torch.dtype, *, quantization: str | None = None) -> int:
    """Bytes of what `random_weights` makes, without making it. A tied head is counted once."""
    total = sum(count * size * _vector_type(name, dtype).itemsize for name, count, size in vectors(config))
    for name, count, rows, columns in matrices(config):
        divided = quantization if name in ("qkv", "o", "gate_up", "down") else None
        scheme = None if divided is None else scheme_for(divided, columns)
        total += count * rows * (columns * dtype.itemsize if scheme is None else row_bytes(columns, scheme))
    return total


def _vector_type(name: str, dtype: torch.dtype) -> torch.dtype:
    return dtype if name.endswith("_bias") else torch.float32


class _Maker:
    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int, quantization: str | None
    ) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype
        self._quantization = quantization
        self._generator = torch.Generator(device).manual_seed(seed)

    def make(self) -> ModelWeights:
        c = self._config
        embedding = self._dense(c.vocab_size, c.hidden_size)
        return ModelWeights(
            embedding=embedding,
            layers=tuple(map(self._layer, range(c.num_layers))),
            final_norm=self._ones(c.hidden_size),
            head=embedding if c.tie_word_embeddings else self._dense(c.vocab_size, c.hidden_size),
            rope_factors=None,
        )

    def _layer(self, number: int) -> LayerWeights:
        c, family = self._config, self._config.family
        hidden, fused = c.hidden_size, c.q_size + 2 * c.kv_size
        sparse = c.has_experts(number)
        biased = family.qkv_bias or c.attention_bias
        return LayerWeights(
            attn_norm=self._ones(hidden),
            qkv=self._matrix(fused, hidden),
            qkv_bias=self._normal(fused) if biased else None,
            q_norm=self._ones(c.head_dim) if family.qk_norm else None,
            k_norm=self._ones(c.head_dim) if family.qk_norm else None,
            o=self._matrix(hidden, c.q_size),
            ffn_norm=self._ones(hidden),
            gate_up=None if sparse else self._matrix(2 * c.intermediate_size, hidden),
            down=None if sparse else self._matrix(hidden, c.intermediate_size),
            o_bias=self._normal(hidden) if c.attention_bias else None,
            post_attn_norm=self._ones(hidden) if family.post_norms else None,
            post_ffn_norm=self._ones(hidden) if family.post_norms else None,
            experts=self._experts() if sparse else None,
        )

    def _experts(self) -> ExpertWeights:
        c = self._config
        return ExpertWeights(
            self._dense(c.num_experts, c.hidden_size),
            self._normal(c.num_experts, 2 * c.expert_size, c.hidden_size),
            self._normal(c.num_experts, c.hidden_size, c.expert_size),
        )

    def _matrix(self, rows: int, columns: int) -> Weight:
        """A matrix of a layer, quantised if that is asked for and its rows divide."""
        weight = self._dense(rows, columns)
        scheme = None if self._quantization is None else scheme_for(self._quantization, columns)
        return weight if scheme is None else Weight(quantize(weight.data, scheme), scheme, (rows, columns))

    def _dense(self, rows: int, columns: int) -> Weight:
        return Weight(self._normal(rows, columns), UNQUANTIZED, (rows, columns))

    def _normal(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(0.0, STD, generator=self._generator)

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=torch.float32, device=self._device)
