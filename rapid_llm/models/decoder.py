"""The one decoder. What a family has or lacks is read off its row and its weights; no family has code of its own.

Invariant: a forward pass is a fixed list of bound calls over views, with no decision but the bucket of its token count.
What a model lacks costs nothing: parts that only some have are composed into the calls when those are bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from rapid_llm.kernels import Selected, dispatch
from rapid_llm.kernels.preparation import prepare
from rapid_llm.kernels.registry.spec import dtype_label

from .attention_metadata import AttentionMetadata, KVCache
from .config import ModelConfig
from .fused import FusedLayer, FusedRows, fused_rows
from .op_table import Binder, Choose, Examples, OpTable, Wrap, buckets, find, ops_of
from .packing import PackedLayer, PackedLinear, PackedModel, linear_kinds, pack
from .parallel import Ranks
from .quant import UNQUANTIZED
from .rotary_table import rotary_table
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
    """One layer's calls, with their weights bound, and the norm that follows the layer. attend: decode or prefill.
    experts: stands for gate_up, activation and down. o, down, experts: with a norm behind, where the family has one."""

    qkv: Call
    q_norm: Call | None
    k_norm: Call | None
    cos_sin: Tensor
    attend: Call
    o: Call
    ffn_norm: Tensor
    gate_up: Call | None
    down: Call | None
    experts: Call | None
    next_norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """All calls of one bucket. decode, prefill: the layers, which differ in `attend` alone. fused: what takes the place
    of their products and norms when a step has one token."""

    embed: Call
    norm: Call
    add_norm: Call
    rope_write: Call
    activation: Call | None
    decode: tuple[_Layer, ...]
    prefill: tuple[_Layer, ...]
    head: Call
    fused: tuple[FusedLayer, ...] | None


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


class Decoder:
    """A decoder bound to one device and dtype.

    weights: as `load_weights` gives them for the same device and `activation_dtype(dtype, device)`; the decoder keeps
    what its rows read, so drop other references to free the rest. page_size: tokens in a page of the cache. choose:
    binds each op's row; `dispatch`, unless rows are to be compared. max_model_len: the longest sequence to be served,
    by which rotary scaling that depends on a length ("dynamic", LongRoPE) is chosen; the trained context by default.
    kv_dtype: of the cache, where it is not the activations'. ranks: where config and weights are one rank's part of a
    model (`parallel.Shard`), what it exchanges with the others. fuse: whether steps of one token take the fused ops of
    `fused`; None where these have rows of their own, True wherever the model's layers allow it. Choosing rows and
    packing weights for them happens here, once; `forward` and `compute_logits` only call.

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
        max_model_len: int | None = None,
        kv_dtype: torch.dtype | None = None,
        ranks: Ranks | None = None,
        fuse: bool | None = None,
    ) -> None:
        self.config = config
        self._ranks = ranks
        self.device = device
        self.activation_dtype = activation_dtype(dtype, device)
        self.kv_dtype = self.activation_dtype if kv_dtype is None else kv_dtype
        _check_dtype(weights, self.activation_dtype)
        binder = Binder(
            config,
            device=device,
            dtype=self.activation_dtype,
            allow_roundings=dtype == "auto" and device.type == "cpu",
            page_size=page_size,
            choose=choose,
            kv_dtype=self.kv_dtype,
        )
        length = config.max_model_len if max_model_len is None else max_model_len
        self._cos_sin = rotary_table(config.rope, config.rotary_dim, length, weights.rope_factors).to(device)
        self._local_cos_sin = (
            self._cos_sin
            if config.local_rope is None
            else rotary_table(config.local_rope, config.rotary_dim, length).to(device)
        )
        self.ranges = buckets(device, ops_of(config))
        self._limits = [b.high for b in self.ranges if b.high is not None]
        experts = next((layer.experts for layer in weights.layers if layer.experts is not None), None)
        examples = Examples(weights.embedding, linear_kinds(weights), self._cos_sin, experts)
        prepare(key for b in self.ranges for key in binder.keys(b, examples))  # side by side, not in turn
        self._tables = [binder.table(b, examples) for b in self.ranges]
        self._model: PackedModel = pack(weights, self._tables)
        self._fused: FusedRows | None = None
        wanted = fuse or (fuse is None and device.type == "cuda")
        if wanted and ranks is None and self.ranges[0].high == 1:
            self._fused = fused_rows(binder, config, weights, choose, floor=fuse is True)
        self._split = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
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
        if plan.fused is not None and meta.decode:
            return self._forward_fused(plan, plan.fused, input_ids, meta, kv)
        add_norm, rope_write, activation = plan.add_norm, plan.rope_write, plan.activation
        positions, slots, split = meta.positions, meta.slot_mapping, self._split
        heads, head_dim, eps, flat = sum(split), self.config.head_dim, self.config.rms_norm_eps, self.config.q_size
        where: tuple[Any, ...] = (meta.seq_lens, meta.block_table, self.config.scale)
        if not meta.decode:
            where = (meta.cu_seqlens_q, *where)
        residual: Tensor = plan.embed(input_ids)
        hidden: Tensor = plan.norm(residual, self._first_norm, eps)
        for layer, (k_cache, v_cache) in zip(plan.decode if meta.decode else plan.prefill, kv, strict=True):
            query, key, value = layer.qkv(hidden).view(tokens, heads, head_dim).split_with_sizes(split, 1)
            if layer.q_norm is not None:
                query, key = layer.q_norm(query), layer.k_norm(key)
            rope_write(query, key, value, k_cache, v_cache, positions, layer.cos_sin, slots)
            hidden = layer.o(layer.attend(query, k_cache, v_cache, *where).view(tokens, flat))
            add_norm(hidden, residual, layer.ffn_norm, eps)
            dense = layer.experts is None
            hidden = layer.down(activation(layer.gate_up(hidden))) if dense else layer.experts(hidden)
            add_norm(hidden, residual, layer.next_norm, eps)
        return hidden

    def _forward_fused(
        self, plan: _Plan, fused: tuple[FusedLayer, ...], input_ids: Tensor, meta: AttentionMetadata, kv: KVCache
    ) -> Tensor:
        """The same for one token a sequence, in fewer calls."""
        tokens, split, flat = input_ids.shape[0], self._split, self.config.q_size
        positions, slots, rope_write = meta.positions, meta.slot_mapping, plan.rope_write
        heads, head_dim = sum(split), self.config.head_dim
        where = (meta.seq_lens, meta.block_table, self.config.scale)
        residual: Tensor = plan.embed(input_ids)
        for layer, calls, (k_cache, v_cache) in zip(plan.decode, fused, kv, strict=True):
            query, key, value = calls.qkv(residual).view(tokens, heads, head_dim).split_with_sizes(split, 1)
            if layer.q_norm is not None and layer.k_norm is not None:
                query, key = layer.q_norm(query), layer.k_norm(key)
            rope_write(query, key, value, k_cache, v_cache, positions, layer.cos_sin, slots)
            attended = layer.attend(query, k_cache, v_cache, *where).view(tokens, flat)
            calls.add_o(attended, residual=residual)
            calls.add_down(calls.activated(residual), residual=residual)
        hidden: Tensor = plan.norm(residual, self._model.final_norm, self.config.rms_norm_eps)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocab_size) fp32 logits of (rows, hidden_size) final hidden states."""
        with torch.inference_mode():
            logits: Tensor = self._plans[find(self._limits, hidden.shape[0])].head(hidden).float()
            cap = self.config.logit_softcap
            return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def bindings(self) -> list[tuple[str, str, Selected]]:
        """(bucket, op id, handle) of every row in use, for `LLM.explain()`."""
        fused = [] if self._fused is None else self._fused.handles()
        found = [entry for table in self._tables for entry in table.bindings()]
        return [*found, *((str(self.ranges[0]), handle.spec.op, handle) for handle in fused)]

    def handles(self, tokens: int) -> list[Selected]:
        """Every row that a step of `tokens` tokens may call."""
        found = [handle for _, _, handle in self._tables[find(self._limits, tokens)].bindings()]
        return found + (self._fused.handles() if self._fused is not None and tokens == 1 else [])

    def weight_bytes(self, tokens: int) -> tuple[int, int]:
        """What a step of `tokens` tokens reads at least: (every dense weight and the head once, all experts), in bytes.

        A matrix counts as it was loaded, or as the form that its row reads where that is smaller. Of the experts a step
        reads those that its tokens choose; of the embedding, a row for each token.
        """
        return self._model.read_bytes(find(self._limits, tokens))

    def memory(self) -> dict[str, int]:
        """Bytes held: `weights_quantized` and `weights_dense` as loaded, `weights_packed` copies made for rows that
        read a form of their own, `rotary_table`."""
        tables = {id(table): table.nbytes for table in (self._cos_sin, self._local_cos_sin)}
        return {**self._model.memory(), "rotary_table": sum(tables.values())}

    def observe(self, observer: Observer | None) -> None:
        """Send every op call through `observer.call(op_id, row_name, fn, args, kwargs)`; None ends it, at no cost."""
        self.observed = observer is not None
        wrap: Wrap = _bare if observer is None else partial(_observed, observer)
        self._first_norm = self._model.layers[0].norms["attn_norm"]
        self._plans = [self._plan(i, table, wrap) for i, table in enumerate(self._tables)]

    def _plan(self, bucket: int, table: OpTable, wrap: Wrap) -> _Plan:
        model = self._model
        binding = _Binding(self.config, bucket, table, wrap, self._ranks)
        rows, scheme = model.embedding.data, model.embedding.scheme
        embed: Call = partial(wrap(table.embedding), weight=rows, dtype=self.activation_dtype, scheme=scheme)
        if self._ranks is not None:
            embed = self._ranks.embedded(embed, model.embedding.shape[0])
        if table.embedding_scale is not None:
            # Rounded to the activations' dtype, as the model was trained.
            factor = torch.tensor(self.config.hidden_size**0.5, dtype=self.activation_dtype).item()
            embed = _scaled(embed, wrap(table.embedding_scale), factor)
        next_norms = [layer.norms["attn_norm"] for layer in model.layers[1:]] + [model.final_norm]
        decode, prefill = [], []
        for number, (layer, next_norm) in enumerate(zip(model.layers, next_norms, strict=True)):
            window = self.config.window(number)
            bound = binding.layer(
                layer,
                cos_sin=self._local_cos_sin if window else self._cos_sin,
                attend=binding.attention(table.decode, window),
                next_norm=next_norm,
            )
            decode.append(bound)
            prefill.append(replace(bound, attend=binding.attention(table.prefill, window)))
        return _Plan(
            embed=embed,
            norm=wrap(table.rmsnorm),
            add_norm=wrap(table.fused_add_rmsnorm),
            rope_write=wrap(table.rope_write),
            activation=None if table.activation is None else wrap(table.activation),
            decode=tuple(decode),
            prefill=tuple(prefill),
            head=binding.head(model.head),
            fused=self._fused.bind(wrap) if self._fused is not None and bucket == 0 else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Binding:
    """Binds the calls of one bucket to a layer's weights."""

    config: ModelConfig
    bucket: int
    table: OpTable
    wrap: Wrap
    ranks: Ranks | None

    def linear(self, linear: PackedLinear) -> Call:
        handle, form = linear.choices[self.bucket]
        return partial(self.wrap(handle), weight=form, bias=linear.bias, scheme=linear.scheme)

    def head(self, linear: PackedLinear) -> Call:
        call = self.linear(linear)
        return call if self.ranks is None else self.ranks.gathered(call, self.config.vocab_size)

    def attention(self, rows: dict[int, Selected], window: int) -> Call:
        row, softcap = self.wrap(rows[window]), self.config.attention_softcap
        return partial(row, window=window, softcap=softcap) if window or softcap else row

    def layer(self, layer: PackedLayer, *, cos_sin: Tensor, attend: Call, next_norm: Tensor) -> _Layer:
        linears, norms = {name: self.linear(linear) for name, linear in layer.linears.items()}, layer.norms
        behind = norms.get("post_ffn_norm")
        return _Layer(
            qkv=linears["qkv"],
            q_norm=self._head_norm(norms.get("q_norm")),
            k_norm=self._head_norm(norms.get("k_norm")),
            cos_sin=cos_sin,
            attend=attend,
            o=self._summed(linears["o"], norms.get("post_attn_norm")),
            ffn_norm=norms["ffn_norm"],
            gate_up=linears.get("gate_up"),
            down=self._summed(linears["down"], behind) if "down" in linears else None,
            experts=self._summed(self._experts(layer.experts, linears["router"]), behind) if layer.experts else None,
            next_norm=next_norm,
        )

    def _head_norm(self, weight: Tensor | None) -> Call | None:
        if weight is None or self.table.head_norm is None:
            return None
        return partial(self.wrap(self.table.head_norm), weight=weight, eps=self.config.rms_norm_eps)

    def _summed(self, call: Call, weight: Tensor | None) -> Call:
        """What adds to the residual: summed over the ranks, then, where `weight` is a norm's, normalised."""
        if self.ranks is not None:
            call = self.ranks.summed(call)
        if weight is None:
            return call
        norm, eps = self.wrap(self.table.rmsnorm), self.config.rms_norm_eps

        def both(input: Tensor) -> Any:
            return norm(call(input), weight, eps)

        return both

    def _experts(self, weights: tuple[Tensor, Tensor], router: Call) -> Call:
        if self.table.topk is None or self.table.experts is None:
            raise ValueError("a layer has experts, and no rows were chosen for them: bind with examples")
        topk, experts = self.wrap(self.table.topk), self.wrap(self.table.experts)
        count, renormalize = self.config.experts_per_token, self.config.renormalize
        gate_up, down = weights

        def routed(hidden: Tensor) -> Any:
            return experts(hidden, gate_up, down, *topk(router(hidden), count, renormalize))

        return routed


def _scaled(embed: Call, scale: Call, factor: float) -> Call:
    def both(input_ids: Tensor) -> Any:
        return scale(embed(input_ids), factor)

    return both


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
    found = [(weights.embedding, None), (weights.head, None)]
    found += [linear for layer in weights.layers for linear in layer.linears().values()]
    tensors = [weight.data for weight, _ in found if weight.scheme == UNQUANTIZED]
    tensors += [bias for _, bias in found if bias is not None]
    tensors += [t for layer in weights.layers if layer.experts for t in (layer.experts.gate_up, layer.experts.down)]
    for tensor in tensors:
        if tensor.dtype != dtype:
            raise ValueError(f"weights are {tensor.dtype}, activations {dtype}: load them with dtype={dtype}")
