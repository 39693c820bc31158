"""The work of `load_weights`: from named tensors to fused matrices, one tensor at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from . import names as naming
from .config import ModelConfig
from .errors import TensorSetError, UnsupportedTensorError
from .quant import DENSE_TYPES, SCHEMES, UNQUANTIZED, dequantize
from .source import TensorSource
from .weights import ExpertWeights, LayerWeights, ModelWeights, Progress, Weight, unpermute

_log = logging.getLogger(__name__)

_PLAIN: Final = frozenset({"float32", "float16", "bfloat16", "float64"})
_BLOCKS: Final = {ggml: scheme for ggml, scheme in SCHEMES.items() if ggml not in DENSE_TYPES}


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a fused matrix. at: the tensor's name without `.weight`. heads > 0 undoes the interleaving."""

    at: str
    rows: int
    heads: int = 0


class Loader:
    """See `load_weights`."""

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        progress: Progress | None = None,
    ) -> None:
        self._source = source
        self._config = config
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._there = frozenset(source.names())
        self._names = naming.find(self._there, config, source.path)
        self._left = set(self._there)
        self._mixed: list[str] = []
        self._dense_experts: list[str] = []

    def load(self) -> ModelWeights:
        config, names = self._config, self._names
        embedding = self._matrix(names.embedding, config.vocab_size, config.hidden_size)
        weights = ModelWeights(
            embedding=embedding,
            layers=tuple(map(self._layer, range(config.num_layers))),
            final_norm=self._norm(names.final_norm, config.hidden_size),
            head=self._head(embedding),
            rope_factors=self._rope_factors(),
        )
        self._refuse_leftovers()
        self._say_what_is_dense()
        return weights

    def _layer(self, number: int) -> LayerWeights:
        c, family = self._config, self._config.family
        norms = {
            part: self._norm(
                self._names.at(number, part), c.head_dim if part in ("q_norm", "k_norm") else c.hidden_size
            )
            for part, there in (
                *(("attn_norm", True), ("q_norm", family.qk_norm), ("k_norm", family.qk_norm)),
                *(("post_attn_norm", family.post_norms), ("ffn_norm", True), ("post_ffn_norm", family.post_norms)),
            )
            if there
        }
        qkv = self._qkv_parts(number)
        biased = family.qkv_bias or c.attention_bias
        o = self._names.at(number, "o")
        sparse = c.has_experts(number)
        return LayerWeights(
            attn_norm=norms["attn_norm"],
            qkv=self._fused(qkv, c.hidden_size),
            qkv_bias=self._bias(qkv) if biased else None,
            q_norm=norms.get("q_norm"),
            k_norm=norms.get("k_norm"),
            o=self._matrix(o, c.hidden_size, c.q_size),
            ffn_norm=norms["ffn_norm"],
            gate_up=None if sparse else self._gate_up(number),
            down=None if sparse else self._matrix(self._names.at(number, "down"), c.hidden_size, c.intermediate_size),
            o_bias=self._bias([_Part(o, c.hidden_size)]) if c.attention_bias else None,
            post_attn_norm=norms.get("post_attn_norm"),
            post_ffn_norm=norms.get("post_ffn_norm"),
            experts=self._experts(number) if sparse else None,
        )

    def _qkv_parts(self, number: int) -> list[_Part]:
        c = self._config
        if c.family.fused:
            return [_Part(self._names.at(number, "qkv"), c.q_size + 2 * c.kv_size)]
        permuted = c.family.qk_permuted and self._names.gguf
        q, k, v = (self._names.at(number, part) for part in ("q", "k", "v"))
        return [
            _Part(q, c.q_size, c.num_heads if permuted else 0),
            _Part(k, c.kv_size, c.num_kv_heads if permuted else 0),
            _Part(v, c.kv_size),
        ]

    def _gate_up(self, number: int) -> Weight:
        wide, at = self._config.intermediate_size, self._names.at
        if self._config.family.fused:
            return self._matrix(at(number, "gate_up"), 2 * wide, self._config.hidden_size)
        return self._fused([_Part(at(number, part), wide) for part in ("gate", "up")], self._config.hidden_size)

    # Matrices --------------------------------------------------------------------------------------------------------

    def _matrix(self, at: str, rows: int, columns: int) -> Weight:
        return self._fused([_Part(at, rows)], columns)

    def _fused(self, parts: Sequence[_Part], columns: int) -> Weight:
        """The rows of several tensors in one matrix."""
        self._refuse_incomplete([f"{part.at}.weight" for part in parts])
        names = [self._take(f"{part.at}.weight", (part.rows, columns)) for part in parts]
        schemes = [self._scheme(name) for name in names]
        mixed = len(set(schemes)) > 1
        if mixed:
            self._mixed.append(" + ".join(f"{name} {self._source.dtype(name)}" for name in names))
        scheme = UNQUANTIZED if mixed else schemes[0]
        total = sum(part.rows for part in parts)
        data: Tensor | None = None
        at = 0
        for part, name, kind in zip(parts, names, schemes, strict=True):
            rows = self._source.data(name)
            if kind != scheme:
                rows = dequantize(rows, kind)
            if data is None:
                dtype = self._dtype if scheme == UNQUANTIZED else torch.uint8
                data = torch.empty((total, rows.shape[1]), dtype=dtype, device=self._device)
            target = data[at : at + part.rows]
            if part.heads:
                target.view(part.heads, 2, -1, data.shape[1]).copy_(unpermute(rows, part.heads))
            else:
                target.copy_(rows)
            at += part.rows
        assert data is not None
        return Weight(data, scheme, (total, columns))

    def _refuse_incomplete(self, names: Sequence[str]) -> None:
        missing = [n for n in names if n not in self._there]
        if missing and len(missing) < len(names):
            have = ", ".join(n for n in names if n in self._there)
            raise TensorSetError(f"{self._source.path}: {have} without {', '.join(missing)}: the group is incomplete")

    def _scheme(self, name: str) -> str:
        kind = self._source.dtype(name)
        if kind in _PLAIN:
            return UNQUANTIZED
        if kind not in _BLOCKS:
            raise UnsupportedTensorError(
                f"{self._source.path}: tensor '{name}' has the type {kind}, which no op computes with; "
                f"quantise the model to one of {', '.join(SCHEMES)}"
            )
        return _BLOCKS[kind]

    def _head(self, embedding: Weight) -> Weight:
        """The head in the file if there is one, the embedding if it is tied to that; a configuration that promises the
        one where the file has the other is obeyed where it asks for a tensor, and contradicted aloud where not."""
        c, name = self._config, f"{self._names.head}.weight"
        if name not in self._there:
            if c.tie_word_embeddings:
                return embedding
            raise TensorSetError(
                f"{self._source.path}: tensor '{name}' is missing, and the configuration has tie_word_embeddings = "
                "false; set it to true if the head is the embedding table, or convert the model again"
            )
        head = self._matrix(self._names.head, c.vocab_size, c.hidden_size)
        if not c.tie_word_embeddings:
            return head
        same = head.scheme == embedding.scheme and torch.equal(head.data, embedding.data)
        _log.warning(
            "%s: tie_word_embeddings is true, and there is a head '%s' of its own%s",
            self._source.path,
            name,
            "; it equals the embedding, which is used for both" if same else " that differs; the model's head is that",
        )
        return embedding if same else head

    # Experts ---------------------------------------------------------------------------------------------------------

    def _experts(self, number: int) -> ExpertWeights:
        c = self._config
        count, wide, hidden = c.num_experts, c.expert_size, c.hidden_size
        gate_up = torch.empty((count, 2 * wide, hidden), dtype=self._dtype, device=self._device)
        down = torch.empty((count, hidden, wide), dtype=self._dtype, device=self._device)
        places = {"gate": gate_up[:, :wide], "up": gate_up[:, wide:], "down": down}
        if self._names.expert:
            for part, place in places.items():
                for expert in range(count):
                    at = self._names.of_expert(number, part, expert)
                    self._fill(f"{at}.weight", place[expert])
        elif self._names.gguf:
            for part, place in places.items():
                self._fill(f"{self._names.at(number, f'experts_{part}')}.weight", place)
        else:
            self._fill(self._names.at(number, "experts_gate_up"), gate_up)
            self._fill(self._names.at(number, "experts_down"), down)
        router = self._matrix(self._names.at(number, "router"), count, hidden)
        return ExpertWeights(router, gate_up, down)

    def _fill(self, name: str, place: Tensor) -> None:
        """Copy a tensor, of one expert or of all, to its place, as dense numbers."""
        self._take(name, tuple(place.shape))
        scheme, rows = self._scheme(name), self._source.data(name)
        if scheme == UNQUANTIZED:
            place.copy_(rows)
            return
        self._dense_experts.append(name)
        for target, blocks in zip(_matrices(place), _matrices(rows), strict=True):
            target.copy_(dequantize(blocks, scheme))

    # Vectors ---------------------------------------------------------------------------------------------------------

    def _norm(self, at: str, size: int) -> Tensor:
        weight = self._vector(f"{at}.weight", size, torch.float32)
        return weight.add_(1.0) if self._config.family.norm_offset and not self._names.gguf else weight

    def _bias(self, parts: Sequence[_Part]) -> Tensor:
        found = []
        for part in parts:
            bias = self._vector(f"{part.at}.bias", part.rows, self._dtype)
            found.append(unpermute(bias.view(-1, 1), part.heads).reshape(-1) if part.heads else bias)
        return torch.cat(found)

    def _vector(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        self._take(name, (size,))
        kind = self._source.dtype(name)
        if kind not in _PLAIN:
            raise UnsupportedTensorError(f"{self._source.path}: vector '{name}' has the type {kind}, not float32")
        return self._source.data(name).to(self._device, dtype, copy=True)

    def _rope_factors(self) -> Tensor | None:
        name = naming.ROPE_FACTORS
        if not self._config.family.rope_factors or name not in self._there:
            return None
        factors = self._vector(name, self._config.rotary_dim // 2, torch.float32)
        if not bool((factors > 0).all()):
            raise TensorSetError(f"{self._source.path}: {name} holds {factors.min().item()}; factors are > 0")
        return factors

    # The set ---------------------------------------------------------------------------------------------------------

    def _take(self, name: str, shape: tuple[int, ...]) -> str:
        if name not in self._there:
            raise TensorSetError(f"{self._source.path}: tensor '{name}' is missing; convert the model again")
        found = self._source.shape(name)
        if found != shape:
            raise TensorSetError(f"{self._source.path}: tensor '{name}' has shape {found}, not {shape}")
        self._left.remove(name)
        if self._progress is not None:
            self._progress(len(self._there) - len(self._left), len(self._there))
        return name

    def _refuse_leftovers(self) -> None:
        passed = sorted(filter(self._names.is_passed, self._left))
        names = sorted(self._left.difference(passed))
        of_images = [n for n in passed if n.startswith(self._names.passed) and not self._names.gguf]
        if of_images:
            _log.warning("%s: only text is read: %d tensors of images are left out", self._source.path, len(of_images))
        if not names:
            return
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        rope = [n for n in names if "rope_f" in n]
        if rope:
            raise UnsupportedTensorError(f"{self._source.path}: rotary scaling by '{rope[0]}' is not supported")
        raise TensorSetError(
            f"{self._source.path}: no part of a {self._config.architecture} model takes {shown}; "
            "ignoring them would compute another model"
        )

    def _say_what_is_dense(self) -> None:
        for found, what in (
            (self._mixed, "fused groups mix tensor types"),
            (self._dense_experts, "tensors of experts"),
        ):
            if found:
                _log.warning("%s: %d %s and are kept dense (%s first)", self._source.path, len(found), what, found[0])


def _matrices(stack: Tensor) -> Sequence[Tensor]:
    return list(stack) if stack.dim() == 3 else [stack]
