"""Weights streamed from a GGUF file into the form that the decoder computes with.

Quantised rows stay quantised: fusing q, k, v into one matrix, and undoing the converter's interleaving of rotary pairs,
only move whole rows. The set of tensors is checked both ways: what a layer needs must be there, once and of the right
shape, and what no layer takes is an error, because a tensor that is ignored is a model that computes something else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import ModelConfig
from .errors import TensorSetError, UnsupportedTensorError
from .gguf import GGUFFile, TensorInfo
from .quant import DENSE_TYPES, SCHEMES, UNQUANTIZED, dequantize

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One matrix. shape: (out_features, in_features) in weights. scheme 'unquantized': data has that shape, in the
    activations' dtype. A block scheme: data is (out_features, bytes a row) uint8."""

    data: Tensor
    scheme: str
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer. qkv: rows of q, then k, then v. gate_up: rows of the gate, then of up. Norms and biases: dense
    vectors, norms in fp32, biases in the activations' dtype; None where the family has none."""

    attn_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    ffn_norm: Tensor
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """A whole model. head is the very object `embedding` where the two are tied. rope_factors: (rotary_dim / 2,) fp32
    divisors of the rotary frequencies, or None."""

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Weight
    rope_factors: Tensor | None


def load_weights(file: GGUFFile, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Read every tensor of `file` on to `device`; dense matrices and biases become `dtype`, the activations' dtype.

    A fused group whose parts are of different types (a q8_0 v beside q4_0 q and k) is kept dense, in `dtype`, which is
    what the ops compute with such a weight anyway; one warning says how many. Raises `TensorSetError` for tensors that
    are missing, left over or of the wrong shape and for an incomplete group, `UnsupportedTensorError` for types and
    kinds of tensors that no op computes with.
    """
    return _Loader(file, config, device, dtype).load()


def unpermute(rows: Tensor, heads: int) -> Tensor:
    """A view in which each head's rows go from interleaved pairs (0, d/2, 1, d/2 + 1, ...) to order (0, 1, ..., d - 1).

    rows: (heads * d, anything), contiguous, weights or bytes of quantised rows. Returns (heads, 2, d / 2, anything).
    Source of the order: the llama conversion of llama.cpp, which swaps the axes of (heads, 2, d / 2, ...).
    """
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2)


class _Loader:
    def __init__(self, file: GGUFFile, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._file = file
        self._config = config
        self._device = device
        self._dtype = dtype
        self._left = set(file.tensors)
        self._mixed: list[str] = []

    def load(self) -> ModelWeights:
        config = self._config
        table = (config.vocab_size, config.hidden_size)
        embedding = self._matrix("token_embd.weight", table)
        weights = ModelWeights(
            embedding=embedding,
            layers=tuple(self._layer(f"blk.{i}.") for i in range(config.num_layers)),
            final_norm=self._vector("output_norm.weight", config.hidden_size, torch.float32),
            head=embedding if config.tie_word_embeddings else self._matrix("output.weight", table),
            rope_factors=self._rope_factors(),
        )
        self._refuse_leftovers()
        if self._mixed:
            _log.warning(
                "%s: %d fused groups mix tensor types and are kept dense (%s first)",
                self._file.path,
                len(self._mixed),
                self._mixed[0],
            )
        return weights

    def _layer(self, at: str) -> LayerWeights:
        c = self._config
        q, kv, hidden, wide = c.q_size, c.kv_size, c.hidden_size, c.intermediate_size
        names = (f"{at}attn_q", f"{at}attn_k", f"{at}attn_v")
        heads = (c.num_heads, c.num_kv_heads, 0) if c.family.qk_permuted else (0, 0, 0)
        gates = (f"{at}ffn_gate.weight", f"{at}ffn_up.weight")
        norms = c.family.qk_norm
        return LayerWeights(
            attn_norm=self._vector(f"{at}attn_norm.weight", hidden, torch.float32),
            qkv=self._fused([f"{n}.weight" for n in names], [(q, hidden), (kv, hidden), (kv, hidden)], heads),
            qkv_bias=self._biases(names, (q, kv, kv), heads) if c.family.qkv_bias else None,
            q_norm=self._vector(f"{at}attn_q_norm.weight", c.head_dim, torch.float32) if norms else None,
            k_norm=self._vector(f"{at}attn_k_norm.weight", c.head_dim, torch.float32) if norms else None,
            o=self._matrix(f"{at}attn_output.weight", (hidden, q)),
            ffn_norm=self._vector(f"{at}ffn_norm.weight", hidden, torch.float32),
            gate_up=self._fused(gates, [(wide, hidden), (wide, hidden)], (0, 0)),
            down=self._matrix(f"{at}ffn_down.weight", (hidden, wide)),
        )

    def _matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        return self._fused([name], [shape], (0,))

    def _fused(self, names: Sequence[str], shapes: Sequence[tuple[int, int]], heads: Sequence[int]) -> Weight:
        """The rows of several tensors in one matrix; `heads` > 0 undoes the interleaving of that part."""
        missing = [n for n in names if n not in self._file.tensors]
        if missing and len(missing) < len(names):
            have = ", ".join(n for n in names if n in self._file.tensors)
            raise TensorSetError(f"{self._file.path}: {have} without {', '.join(missing)}: the group is incomplete")
        infos = [self._take(n, s) for n, s in zip(names, shapes, strict=True)]
        schemes = [self._scheme(i) for i in infos]
        total = sum(rows for rows, _ in shapes)
        mixed = len(set(schemes)) > 1
        if mixed:
            self._mixed.append(" + ".join(f"{i.name} {i.type}" for i in infos))
        scheme = UNQUANTIZED if mixed else schemes[0]
        dense = scheme == UNQUANTIZED
        data = torch.empty(
            (total, infos[0].shape[1] if dense else infos[0].row_bytes),
            dtype=self._dtype if dense else torch.uint8,
            device=self._device,
        )
        at = 0
        for info, part, count in zip(infos, schemes, heads, strict=True):
            rows = self._rows(info, part, dense)
            target = data[at : at + info.shape[0]]
            if count:
                target.view(count, 2, -1, data.shape[1]).copy_(unpermute(rows, count))
            else:
                target.copy_(rows)
            at += info.shape[0]
        return Weight(data, scheme, (total, shapes[0][1]))

    def _rows(self, info: TensorInfo, scheme: str, dense: bool) -> Tensor:
        raw = torch.from_numpy(self._file.data(info.name))
        if scheme == UNQUANTIZED:
            return raw.view(DENSE_TYPES[info.type])
        return dequantize(raw, scheme) if dense else raw

    def _biases(self, names: Sequence[str], sizes: Sequence[int], heads: Sequence[int]) -> Tensor:
        parts = []
        for name, size, count in zip(names, sizes, heads, strict=True):
            part = self._vector(f"{name}.bias", size, self._dtype)
            parts.append(unpermute(part.view(-1, 1), count).reshape(-1) if count else part)
        return torch.cat(parts)

    def _vector(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        info = self._take(name, (size,))
        if info.type not in DENSE_TYPES:
            raise UnsupportedTensorError(f"{self._file.path}: vector '{name}' has the type {info.type}, not F32")
        raw = torch.from_numpy(self._file.data(name)).view(DENSE_TYPES[info.type])
        return raw.view(size).to(self._device, dtype, copy=True)

    def _rope_factors(self) -> Tensor | None:
        if not self._config.family.rope_factors or "rope_freqs.weight" not in self._file.tensors:
            return None
        factors = self._vector("rope_freqs.weight", self._config.rotary_dim // 2, torch.float32)
        if not bool((factors > 0).all()):
            raise TensorSetError(f"{self._file.path}: rope_freqs.weight holds {factors.min().item()}; factors are > 0")
        return factors

    def _take(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._file.tensors.get(name)
        if info is None:
            raise TensorSetError(f"{self._file.path}: tensor '{name}' is missing; convert the model again")
        if info.shape != shape:
            raise TensorSetError(f"{self._file.path}: tensor '{name}' has shape {info.shape}, not {shape}")
        self._left.remove(name)
        return info

    def _scheme(self, info: TensorInfo) -> str:
        if info.type not in SCHEMES:
            raise UnsupportedTensorError(
                f"{self._file.path}: tensor '{info.name}' has the type {info.type}, which no op computes with; "
                f"quantise the model to one of {', '.join(SCHEMES)}"
            )
        return SCHEMES[info.type]

    def _refuse_leftovers(self) -> None:
        if not self._left:
            return
        names = sorted(self._left)
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        rope = [n for n in names if "rope_f" in n]
        if rope:
            raise UnsupportedTensorError(f"{self._file.path}: rotary scaling by '{rope[0]}' is not supported")
        raise TensorSetError(
            f"{self._file.path}: no part of a {self._config.architecture} model takes {shown}; "
            "ignoring them would compute another model"
        )
