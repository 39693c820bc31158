"""The work of `load_weights`: from named tensors to fused matrices, one tensor at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from . import checkpoints
from . import names as naming
from .config import ModelConfig
from .errors import TensorSetError, UnsupportedQuantizationError, UnsupportedTensorError
from .parallel import WHOLE, Cut, Shard
from .parts import Found, Part
from .quant import DENSE_TYPES, SCHEMES, UNQUANTIZED, dequantize
from .quantize import QUANTIZATIONS, quantize, scheme_for
from .source import TensorSource
from .weights import ExpertWeights, LayerWeights, ModelWeights, Progress, Weight, unpermute

_log = logging.getLogger(__name__)

_PLAIN: Final = frozenset({"float32", "float16", "bfloat16", "float64"})
_BLOCKS: Final = {ggml: scheme for ggml, scheme in SCHEMES.items() if ggml not in DENSE_TYPES}


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
        quantization: str | None = None,
        shard: Shard | None = None,
    ) -> None:
        if quantization is not None and quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization={quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
        self._source = source
        self._config = config
        self._device = device
        self._dtype = dtype
        self._shard = shard
        self._progress = progress
        self._there = frozenset(source.names())
        self._names = naming.find(self._there, config, source.path)
        self._left = set(self._there)
        self._reader = None if config.quantization is None else checkpoints.reader(config.quantization, source.path)
        self._quantization = quantization
        self._quantised = 0
        self._mixed: list[str] = []
        self._dense_experts: list[str] = []
        self._unfit: list[str] = []

    def load(self) -> ModelWeights:
        config, names = self._config, self._names
        embedding = self._matrix(names.embedding, "embedding", config.vocab_size, config.hidden_size)
        weights = ModelWeights(
            embedding=embedding,
            layers=tuple(map(self._layer, range(config.num_layers))),
            final_norm=self._norm(names.final_norm, config.hidden_size),
            head=self._head(embedding),
            rope_factors=self._rope_factors(),
        )
        self._refuse_leftovers()
        if self._quantization is not None and not self._quantised:
            raise UnsupportedQuantizationError(
                f"{self._source.path}: quantization={self._quantization!r} finds no dense matrix that it divides; "
                "leave it out"
            )
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
        o_bias = self._bias([Part(o, c.hidden_size, WHOLE)]) if c.attention_bias else None
        sparse = c.has_experts(number)
        return LayerWeights(
            attn_norm=norms["attn_norm"],
            qkv=self._fused(qkv, c.hidden_size, self._quantization),
            qkv_bias=self._bias(qkv) if biased else None,
            q_norm=norms.get("q_norm"),
            k_norm=norms.get("k_norm"),
            o=self._matrix(o, "o", c.hidden_size, c.q_size, self._quantization),
            ffn_norm=norms["ffn_norm"],
            gate_up=None if sparse else self._gate_up(number),
            down=None if sparse else self._down(number),
            o_bias=o_bias if o_bias is None or self._shard is None else self._shard.addend(o_bias),
            post_attn_norm=norms.get("post_attn_norm"),
            post_ffn_norm=norms.get("post_ffn_norm"),
            experts=self._experts(number) if sparse else None,
        )

    def _qkv_parts(self, number: int) -> list[Part]:
        c = self._config
        if c.family.fused:
            return [Part(self._names.at(number, "qkv"), c.q_size + 2 * c.kv_size, self._cut("qkv"))]
        permuted = c.family.qk_permuted and self._names.gguf
        q, k, v = (self._names.at(number, part) for part in ("q", "k", "v"))
        return [
            Part(q, c.q_size, self._cut("q"), c.num_heads if permuted else 0),
            Part(k, c.kv_size, self._cut("k"), c.num_kv_heads if permuted else 0),
            Part(v, c.kv_size, self._cut("v")),
        ]

    def _gate_up(self, number: int) -> Weight:
        wide, at = self._config.intermediate_size, self._names.at
        if self._config.family.fused:
            return self._matrix(
                at(number, "gate_up"), "gate_up", 2 * wide, self._config.hidden_size, self._quantization
            )
        parts = [Part(at(number, part), wide, self._cut(part)) for part in ("gate", "up")]
        return self._fused(parts, self._config.hidden_size, self._quantization)

    def _down(self, number: int) -> Weight:
        c, at = self._config, self._names.at(number, "down")
        return self._matrix(at, "down", c.hidden_size, c.intermediate_size, self._quantization)

    # Matrices --------------------------------------------------------------------------------------------------------

    def _cut(self, part: str) -> Cut:
        return WHOLE if self._shard is None else self._shard.cut(part)

    def _matrix(self, at: str, part: str, rows: int, columns: int, quantization: str | None = None) -> Weight:
        return self._fused([Part(at, rows, self._cut(part))], columns, quantization)

    def _fused(self, parts: Sequence[Part], columns: int, quantization: str | None = None) -> Weight:
        """The rows of several tensors in one matrix; quantization: what dense ones are quantised to."""
        self._refuse_incomplete([f"{part.at}.weight" for part in parts if not self._quantised_parts(part.at)])
        found = [self._find(part, columns, quantization) for part in parts]
        schemes = [rows.scheme for rows in found]
        mixed = len(set(schemes)) > 1
        if mixed:
            self._mixed.append(" + ".join(f"{rows.name} {rows.kind}" for rows in found))
        scheme = UNQUANTIZED if mixed else schemes[0]
        shapes = [part.cut.shape(part.rows, columns) for part in parts]
        total = sum(count for count, _ in shapes)
        data, at = torch.empty(0), 0
        for part, of_part, (count, _) in zip(parts, found, shapes, strict=True):
            rows = part.cut(self._data(of_part), of_part.scheme, of_part.name)
            if of_part.scheme != scheme:
                rows = dequantize(rows, of_part.scheme)
            if at == 0:
                dtype = self._dtype if scheme == UNQUANTIZED else torch.uint8
                data = torch.empty((total, rows.shape[1]), dtype=dtype, device=self._device)
            target = data[at : at + count]
            if part.heads:
                heads = part.heads * count // part.rows
                target.view(heads, 2, -1, data.shape[1]).copy_(unpermute(rows, heads))
            else:
                target.copy_(rows)
            at += count
        return Weight(data, scheme, (total, shapes[0][1]))

    def _find(self, part: Part, columns: int, quantization: str | None) -> Found:
        """What there is of a part, and the scheme that its rows will have."""
        shape = (part.rows, columns)
        weight = self._read(part.at, shape)
        if weight is not None:
            kind = "dense" if weight.scheme == UNQUANTIZED else weight.scheme
            return Found(part.at, kind, weight.scheme, weight.data)
        name = self._take(f"{part.at}.weight", shape)
        scheme, kind = self._scheme(name), self._source.dtype(name)
        if quantization is None or scheme != UNQUANTIZED:
            return Found(name, kind, scheme)
        wanted = scheme_for(quantization, columns)
        if wanted is None:
            self._unfit.append(f"{name} {shape}")
            return Found(name, kind, scheme)
        self._quantised += 1
        return Found(name, wanted, wanted, quantised=True)

    def _data(self, found: Found) -> Tensor:
        """The rows, in the form of their scheme."""
        if found.data is not None:
            return found.data
        data = self._source.data(found.name)
        if not found.quantised:
            return data
        try:
            return quantize(data.to(self._device), found.scheme)
        except ValueError as error:
            raise UnsupportedQuantizationError(f"{self._source.path}: tensor '{found.name}': {error}") from error

    def _quantised_parts(self, at: str) -> tuple[str, ...]:
        """What the checkpoint's own method has of a matrix; () where it is stored as one tensor."""
        return () if self._reader is None else self._reader.parts(self._there, at)

    def _read(self, at: str, shape: tuple[int, int]) -> Weight | None:
        """A matrix in the form of the checkpoint's own method; None where it is stored as one tensor."""
        parts = self._quantised_parts(at)
        if self._reader is None or not parts:
            return None
        tensors = {part: self._source.data(f"{at}.{part}").clone() for part in parts}
        for part in parts:
            self._check_off(f"{at}.{part}")
        weight = self._reader.read(tensors, at)
        if weight.shape != shape:
            raise TensorSetError(f"{self._source.path}: the weight of '{at}' has shape {weight.shape}, not {shape}")
        return weight

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
        if name not in self._there and not self._quantised_parts(self._names.head):
            if c.tie_word_embeddings:
                return embedding
            raise TensorSetError(
                f"{self._source.path}: tensor '{name}' is missing, and the configuration has tie_word_embeddings = "
                "false; set it to true if the head is the embedding table, or convert the model again"
            )
        head = self._matrix(self._names.head, "head", c.vocab_size, c.hidden_size)
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
        count, hidden = c.num_experts, c.hidden_size
        wide = self._cut("experts_gate").shape(c.expert_size, hidden)[0]
        gate_up = torch.empty((count, 2 * wide, hidden), dtype=self._dtype, device=self._device)
        down = torch.empty((count, hidden, wide), dtype=self._dtype, device=self._device)
        places = {"gate": gate_up[:, :wide], "up": gate_up[:, wide:], "down": down}
        if self._names.expert:
            for part, place in places.items():
                for expert in range(count):
                    self._fill_expert(self._names.of_expert(number, part, expert), f"experts_{part}", place[expert])
        elif self._names.gguf:
            for part, place in places.items():
                name = f"experts_{part}"
                self._fill(f"{self._names.at(number, name)}.weight", name, place)
        else:
            for name, place in (("experts_gate_up", gate_up), ("experts_down", down)):
                self._fill(self._names.at(number, name), name, place)
        router = self._matrix(self._names.at(number, "router"), "router", count, hidden)
        return ExpertWeights(router, gate_up, down)

    def _fill_expert(self, at: str, part: str, place: Tensor) -> None:
        weight = self._read(at, self._expert_shape(part))
        if weight is None:
            self._fill(f"{at}.weight", part, place)
            return
        rows = self._cut(part)(weight.data, weight.scheme, at)
        place.copy_(rows if weight.scheme == UNQUANTIZED else dequantize(rows, weight.scheme))
        self._dense_experts.append(at)

    def _fill(self, name: str, part: str, place: Tensor) -> None:
        """Copy what is kept of a tensor, of one expert or of all, to its place, as dense numbers."""
        self._take(name, (*place.shape[:-2], *self._expert_shape(part)))
        scheme = self._scheme(name)
        rows = self._cut(part)(self._source.data(name), scheme, name)
        if scheme == UNQUANTIZED:
            place.copy_(rows)
            return
        self._dense_experts.append(name)
        for target, blocks in zip(_matrices(place), _matrices(rows), strict=True):
            target.copy_(dequantize(blocks, scheme))

    def _expert_shape(self, part: str) -> tuple[int, int]:
        """(rows, columns) of a part of one whole expert."""
        wide, hidden = self._config.expert_size, self._config.hidden_size
        return (hidden, wide) if part == "experts_down" else (wide * (1 + (part == "experts_gate_up")), hidden)

    # Vectors ---------------------------------------------------------------------------------------------------------

    def _norm(self, at: str, size: int) -> Tensor:
        weight = self._vector(f"{at}.weight", size, torch.float32)
        return weight.add_(1.0) if self._config.family.norm_offset and not self._names.gguf else weight

    def _bias(self, parts: Sequence[Part]) -> Tensor:
        found = []
        for part in parts:
            whole = self._vector(f"{part.at}.bias", part.rows, self._dtype)
            bias = part.cut.vector(whole)
            heads = part.heads * len(bias) // part.rows
            found.append(unpermute(bias.view(-1, 1), heads).reshape(-1) if heads else bias)
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
        self._check_off(name)
        return name

    def _check_off(self, name: str) -> None:
        self._left.remove(name)
        if self._progress is not None:
            self._progress(len(self._there) - len(self._left), len(self._there))

    def _is_zero_bias(self, name: str) -> bool:
        """GPTQ's tools give a bias of zeros to every layer that they quantise."""
        return (
            name.endswith(".bias")
            and bool(self._quantised_parts(name.removesuffix(".bias")))
            and not bool(self._source.data(name).any())
        )

    def _refuse_leftovers(self) -> None:
        passed = sorted(name for name in self._left if self._names.is_passed(name) or self._is_zero_bias(name))
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
        own = [] if self._reader is None else [at for at in self._reader.dense if at not in self._dense_experts]
        for found, what in (
            (self._mixed, "fused groups mix tensor types"),
            (self._dense_experts, "tensors of experts"),
            (own, "matrices have groups out of order, of 8 bits, or with scales beyond fp16"),
            (self._unfit, f"matrices have rows that {self._quantization} does not divide"),
        ):
            if found:
                _log.warning("%s: %d %s and are kept dense (%s first)", self._source.path, len(found), what, found[0])


def _matrices(stack: Tensor) -> Sequence[Tensor]:
    return list(stack) if stack.dim() == 3 else [stack]
