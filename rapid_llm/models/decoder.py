"""The one Llama-family decoder. What a family has or lacks is read off its weights; no family has code of its own.

Invariant: a forward pass is a fixed list of bound calls over views, with no decision but the bucket of its token count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from rapid_llm.kernels import Selected, dispatch
from rapid_llm.kernels.preparation import prepare
from rapid_llm.kernels.registry.spec import dtype_label

from .attention_metadata import AttentionMetadata, KVCache
from .config import ModelConfig
from .op_table import Binder, Choose, OpTable, Wrap, buckets, find
from .packing import PackedLinear, PackedModel, linear_kinds, pack
from .quant import UNQUANTIZED
from .weights import ModelWeights

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Labels of the dtypes that activations can have."""

Call = Callable[..., Any]


class Observer(Protocol):
    """Sees every op call of a decoder while it is set."""

    def call(self, op_id: str, row_name: str, fn: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Must return `fn(*args, **kwargs)`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One layer's calls, with their weights bound, and the norm that follows the layer."""

    qkv: Call
    q_norm: Call | None
    k_norm: Call | None
    o: Call
    ffn_norm: Tensor
    gate_up: Call
    down: Call
    next_norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """All calls of one bucket."""

    embed: Call
    norm: Call
    add_norm: Call
    rope_write: Call
    decode: Call
    prefill: Call
    activation: Call
    layers: tuple[_Layer, ...]
    head: Call


def activation_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype of activations that `dtype` asks for; raises `ValueError` for anything else.

    auto: fp32 on a CPU (where weights may then be rounded for speed), bf16 on a GPU, fp16 below SM 80.
    """
    if dtype == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    known = f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)} (float32 and the like are accepted too)"
    try:
        label = dtype_label(dtype)
    except ValueError:
        raise ValueError(known) from None
    if label not in DTYPES:
        raise ValueError(known)
    return DTYPES[label]


def rotary_table(config: ModelConfig, factors: Tensor | None) -> Tensor:
    """(max_model_len, rotary_dim) fp32: cosines, then sines, of position * theta ** (-2i / rotary_dim) / factor[i].

    Angles are taken in fp64, so that far positions are as exact as near ones (RoFormer, Su et al. 2021).
    """
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64) / config.rotary_dim
    frequencies = config.rope_theta**-exponents
    if factors is not None:
        frequencies = frequencies / factors.to("cpu", torch.float64)
    angles = torch.arange(config.max_model_len, dtype=torch.float64).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


class Decoder:
    """A Llama-family decoder bound to one device and dtype.

    weights: as `load_weights` gives them for the same device and `activation_dtype(dtype, device)`; the decoder keeps
    what its rows read, so drop other references to free the rest. page_size: tokens in a page of the cache. choose:
    binds each op's row; `dispatch`, unless rows are to be compared. Choosing rows and packing weights for them happens
    here, once; `forward` and `compute_logits` only call.

    Raises `ValueError` for an unknown dtype or weights of another dtype, and dispatch's errors where an op has no row.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        device: torch.device,
        dtype: str = "auto",
        page_size: int = 16,
        choose: Choose = dispatch,
    ) -> None:
        self.config = config
        self.device = device
        self.activation_dtype = activation_dtype(dtype, device)
        _check_dtype(weights, self.activation_dtype)
        binder = Binder(
            config,
            device=device,
            dtype=self.activation_dtype,
            allow_roundings=dtype == "auto" and device.type == "cpu",
            page_size=page_size,
            choose=choose,
        )
        self._cos_sin = rotary_table(config, weights.rope_factors).to(device)
        ranges = buckets(device)
        self._limits = [b.high for b in ranges if b.high is not None]
        kinds = linear_kinds(weights)
        examples = (weights.embedding, kinds, self._cos_sin)
        prepare(
            key for b in ranges for key in binder.keys(b, *examples)
        )  # side by side, what binding would build in turn
        self._tables = [binder.table(b, *examples) for b in ranges]
        self._model: PackedModel = pack(weights, self._tables)
        self._split = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._scale = config.head_dim**-0.5
        self.observe(None)

    def forward(self, input_ids: Tensor, meta: AttentionMetadata, kv: KVCache) -> Tensor:
        """The final hidden states of a batch; its keys and values are written into `kv`.

        input_ids: (tokens,) int64, each in [0, vocab_size). kv: one (k_cache, v_cache) a layer, in activation_dtype.
        Returns (tokens, hidden_size) in activation_dtype, final norm applied.
        """
        with torch.inference_mode():
            return self._forward(input_ids, meta, kv)

    def _forward(self, input_ids: Tensor, meta: AttentionMetadata, kv: KVCache) -> Tensor:
        tokens = input_ids.shape[0]
        plan = self._plans[find(self._limits, tokens)]
        add_norm, rope_write, activation = plan.add_norm, plan.rope_write, plan.activation
        place, split = (meta.positions, self._cos_sin, meta.slot_mapping), self._split
        heads, head_dim, eps, scale = sum(split), self.config.head_dim, self.config.rms_norm_eps, self._scale
        flat = self.config.q_size
        attend = plan.decode if meta.decode else plan.prefill
        where: tuple[Any, ...] = (meta.seq_lens, meta.block_table, scale)
        if not meta.decode:
            where = (meta.cu_seqlens_q, *where)
        residual: Tensor = plan.embed(input_ids)
        hidden: Tensor = plan.norm(residual, self._first_norm, eps)
        for layer, (k_cache, v_cache) in zip(plan.layers, kv, strict=True):
            query, key, value = layer.qkv(hidden).view(tokens, heads, head_dim).split_with_sizes(split, 1)
            if layer.q_norm is not None and layer.k_norm is not None:
                query, key = layer.q_norm(query), layer.k_norm(key)
            rope_write(query, key, value, k_cache, v_cache, *place)
            hidden = layer.o(attend(query, k_cache, v_cache, *where).view(tokens, flat))
            add_norm(hidden, residual, layer.ffn_norm, eps)
            hidden = layer.down(activation(layer.gate_up(hidden)))
            add_norm(hidden, residual, layer.next_norm, eps)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocab_size) fp32 logits of (rows, hidden_size) final hidden states."""
        with torch.inference_mode():
            logits: Tensor = self._plans[find(self._limits, hidden.shape[0])].head(hidden)
            return logits.float()

    def bindings(self) -> list[tuple[str, str, Selected]]:
        """(bucket, op id, handle) of every row in use, for `LLM.explain()`."""
        return [entry for table in self._tables for entry in table.bindings()]

    def memory(self) -> dict[str, int]:
        """Bytes held: `weights_quantized` and `weights_dense` as loaded, `weights_packed` copies made for rows that
        read a form of their own, `rotary_table`."""
        return {**self._model.memory(), "rotary_table": self._cos_sin.nbytes}

    def observe(self, observer: Observer | None) -> None:
        """Send every op call through `observer.call(op_id, row_name, fn, args, kwargs)`; None ends it, at no cost."""
        wrap: Wrap = _bare if observer is None else partial(_observed, observer)
        self._first_norm = self._model.layers[0].attn_norm
        self._plans = [self._plan(i, table, wrap) for i, table in enumerate(self._tables)]

    def _plan(self, bucket: int, table: OpTable, wrap: Wrap) -> _Plan:
        def linear(layer: PackedLinear) -> Call:
            handle, form = layer.choices[bucket]
            return partial(wrap(handle), weight=form, bias=layer.bias, scheme=layer.scheme)

        def head_norm(weight: Tensor | None) -> Call | None:
            if weight is None or table.head_norm is None:
                return None
            return partial(wrap(table.head_norm), weight=weight, eps=self.config.rms_norm_eps)

        model = self._model
        rows, scheme = model.embedding.data, model.embedding.scheme
        next_norms = [layer.attn_norm for layer in model.layers[1:]] + [model.final_norm]
        return _Plan(
            embed=partial(wrap(table.embedding), weight=rows, dtype=self.activation_dtype, scheme=scheme),
            norm=wrap(table.rmsnorm),
            add_norm=wrap(table.fused_add_rmsnorm),
            rope_write=wrap(table.rope_write),
            decode=wrap(table.decode),
            prefill=wrap(table.prefill),
            activation=wrap(table.activation),
            layers=tuple(
                _Layer(
                    qkv=linear(layer.qkv),
                    q_norm=head_norm(layer.q_norm),
                    k_norm=head_norm(layer.k_norm),
                    o=linear(layer.o),
                    ffn_norm=layer.ffn_norm,
                    gate_up=linear(layer.gate_up),
                    down=linear(layer.down),
                    next_norm=next_norm,
                )
                for layer, next_norm in zip(model.layers, next_norms, strict=True)
            ),
            head=linear(model.head),
        )


def _bare(handle: Selected) -> Call:
    """The row's own function: `Selected` adds nothing to a call, so neither does this."""
    return handle.func


def _observed(observer: Observer, handle: Selected) -> Call:
    op_id, name, fn = handle.spec.op, handle.spec.name, handle.func

    def call(*args: Any, **kwargs: Any) -> Any:
        return observer.call(op_id, name, fn, args, kwargs)

    return call


def _check_dtype(weights: ModelWeights, dtype: torch.dtype) -> None:
    """Dense matrices and biases are loaded in the activations' dtype; anything else was loaded for another decoder."""
    matrices = [weights.embedding, weights.head]
    for layer in weights.layers:
        matrices += [layer.qkv, layer.o, layer.gate_up, layer.down]
    tensors = [m.data for m in matrices if m.scheme == UNQUANTIZED]
    tensors += [layer.qkv_bias for layer in weights.layers if layer.qkv_bias is not None]
    for tensor in tensors:
        if tensor.dtype != dtype:
            raise ValueError(f"weights are {tensor.dtype}, activations {dtype}: load them with dtype={dtype}")
