"""The rows that a decoder runs, chosen once per range of token counts, before anything is served.

Which row is best for a linear layer depends on how many tokens share the weights' bandwidth, so the choice is made for
each range of token counts ("bucket") in which every row's conditions hold or fail alike: the fixed limits below, plus
every limit that a registered row states, plus those between which measured times rank rows alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels import Selected, dispatch
from rapid_llm.kernels.registry import get_op, rows, timing_records
from rapid_llm.kernels.registry.dispatcher import facts_of
from rapid_llm.kernels.registry.spec import AUTO_DIMS

from .config import ModelConfig
from .weights import ExpertWeights, Weight

BUCKET_LIMITS: Final = (1, 8, 31)
"""Token counts that end a bucket: a single GEMV, few rows, more rows, and everything above."""

TOKEN_DIMS: Final = ("tokens", "sequences")
"""Names under which ops speak of the number of tokens."""

USUAL_OPS: Final = (
    *("embedding", "rmsnorm", "fused_add_rmsnorm", "linear", "rope_kvcache_write"),
    *("attention.prefill", "attention.decode", "silu_and_mul"),
)
"""What a decoder of the Llama family calls."""

OPS: Final = (*USUAL_OPS, "scale", "gelu_and_mul", "moe.topk", "fused_moe")
"""Every op that some decoder calls."""

Choose = Callable[..., Selected]
"""Binds a row as `dispatch(op=..., **facts)` does."""

LinearKey = tuple[str, tuple[int, int], bool]
"""What decides a linear's row beside the token count: scheme, (out_features, in_features), whether it has a bias."""


def ops_of(config: ModelConfig) -> tuple[str, ...]:
    """The ops that a decoder of `config` calls, in the order of `OPS`."""
    c, layers = config, range(config.num_layers)
    dense = any(not c.has_experts(i) for i in layers)
    left_out = {
        "scale": not c.family.scaled_embedding,
        "silu_and_mul": not dense or c.family.gelu,
        "gelu_and_mul": not dense or not c.family.gelu,
        "moe.topk": not any(map(c.has_experts, layers)),
        "fused_moe": not any(map(c.has_experts, layers)),
    }
    return tuple(op for op in OPS if not left_out.get(op, False))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Token counts from `low` to `high`, both included; high None: no upper end."""

    low: int
    high: int | None

    def __str__(self) -> str:
        if self.high is None:
            return f"{self.low}+ tokens"
        if self.high == self.low:
            return "1 token" if self.low == 1 else f"{self.low} tokens"
        return f"{self.low}-{self.high} tokens"


@dataclass(frozen=True, slots=True, eq=False)
class OpTable:
    """The bound rows of one bucket. decode, prefill: by window, for rows may lack windows. None: not called."""

    bucket: Bucket
    embedding: Selected
    embedding_scale: Selected | None
    rmsnorm: Selected
    head_norm: Selected | None
    fused_add_rmsnorm: Selected
    rope_write: Selected
    decode: dict[int, Selected]
    prefill: dict[int, Selected]
    activation: Selected | None
    topk: Selected | None
    experts: Selected | None
    linears: dict[LinearKey, Selected]

    def bindings(self) -> Iterator[tuple[str, str, Selected]]:
        """(bucket, op id, handle) of every row in the table."""
        single = (
            *(self.embedding, self.embedding_scale, self.rmsnorm, self.head_norm, self.fused_add_rmsnorm),
            *(self.rope_write, *self.decode.values(), *self.prefill.values()),
            *(self.activation, self.topk, self.experts),
        )
        for handle in (*single, *self.linears.values()):
            if handle is not None:
                yield str(self.bucket), handle.spec.op, handle


def buckets(device: torch.device | None = None, ops: Sequence[str] = USUAL_OPS) -> tuple[Bucket, ...]:
    """Consecutive ranges from one token up, split wherever a row of any of `ops` starts or stops to fit, and where the
    records of times on `device` rank rows anew."""
    limits = set(BUCKET_LIMITS)
    if device is not None:
        limits |= timing_records.limits(ops, TOKEN_DIMS, device.type, device.index)
    for op_id in ops:
        for row in rows(op_id):
            for dim in (*row.shape.require, *row.shape.prefer):
                if dim.name in TOKEN_DIMS:
                    limits.update(() if dim.max is None else (dim.max,))
                    limits.update(() if dim.min is None else (dim.min - 1,))
    ends = sorted(limit for limit in limits if limit >= 1)
    starts = [1, *(end + 1 for end in ends)]
    return tuple(Bucket(low, high) for low, high in zip(starts, [*ends, None], strict=True))


def find(limits: Sequence[int], tokens: int) -> int:
    """The index of the bucket of `tokens`; limits: the upper ends, ascending, of all buckets but the last."""
    return bisect_left(limits, tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Parts of a model that rows are chosen for. linears: one of each kind. experts: of any layer that has them."""

    embedding: Weight
    linears: dict[LinearKey, Weight]
    cos_sin: Tensor
    experts: ExpertWeights | None


def attention_arguments(scale: float, window: int, softcap: float) -> tuple[float | int, ...]:
    """What attention takes behind the block table; the usual values are left to the ops' defaults."""
    return (scale, window, softcap) if window or softcap else (scale,)


class Binder:
    """Chooses rows from example arguments of the model's own shapes, strides and dtypes.

    device, dtype: of the activations. allow_roundings: accept every intermediate rounding that an op permits, for
    speed. page_size: tokens in a page of the cache. choose: what binds a key, `dispatch` or a stand-in for it.
    kv_dtype: of the cache, by default the activations'.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        allow_roundings: bool,
        page_size: int,
        choose: Choose = dispatch,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self._config = config
        self._kv_dtype = dtype if kv_dtype is None else kv_dtype
        self._device = device
        self._dtype = dtype
        self._allow = allow_roundings
        self._page_size = page_size
        self._choose = choose

    def table(self, bucket: Bucket, examples: Examples) -> OpTable:
        """Bind every op for `bucket`."""
        bound = {name: None if key is None else self._choose(**key) for name, key in self._calls(bucket, examples)}
        attention: dict[str, dict[int, Selected]] = {"decode": {}, "prefill": {}}
        for window in self.windows:
            for name, key in self._attention(bucket.low, window):
                attention[name][window] = self._choose(**key)
        rows = {kind: self._choose(**self._linear(bucket.low, kind, w)) for kind, w in examples.linears.items()}
        return OpTable(bucket=bucket, linears=rows, **attention, **bound)  # type: ignore[arg-type]

    def keys(self, bucket: Bucket, examples: Examples) -> list[dict[str, Any]]:
        """What `table` dispatches on, as `prepare` takes it."""
        calls = [key for _, key in self._calls(bucket, examples) if key is not None]
        calls += [key for window in self.windows for _, key in self._attention(bucket.low, window)]
        return [*calls, *(self._linear(bucket.low, kind, weight) for kind, weight in examples.linears.items())]

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct windows of the model's layers."""
        return tuple(sorted(set(self._config.windows))) or (0,)

    def _calls(self, bucket: Bucket, examples: Examples) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """The facts of every op but linears and attention, with the field of `OpTable` that its row goes to; None for
        an op that the model does not call."""
        c, tokens, embedding, called = self._config, bucket.low, examples.embedding, ops_of(self._config)
        hidden = self.empty(tokens, c.hidden_size)
        norm = torch.empty(c.hidden_size, device=self._device)
        query, key, value = self._heads(tokens)
        positions = torch.zeros(tokens, dtype=torch.int64, device=self._device)
        call, where = self.key, (*self._caches(), positions, examples.cos_sin, positions)
        yield "embedding", call("embedding", positions, embedding.data, dtype=self._dtype, scheme=embedding.scheme)
        yield "embedding_scale", call("scale", hidden, 1.0) if "scale" in called else None
        yield "rmsnorm", call("rmsnorm", hidden, norm, c.rms_norm_eps)
        per_head = torch.empty(c.head_dim, device=self._device)
        yield "head_norm", call("rmsnorm", query, per_head, c.rms_norm_eps) if c.family.qk_norm else None
        yield "fused_add_rmsnorm", call("fused_add_rmsnorm", hidden, hidden, norm, c.rms_norm_eps)
        yield "rope_write", call("rope_kvcache_write", query, key, value, *where)
        yield "activation", self._activation(tokens, called)
        routed, experts = (None, None) if examples.experts is None else self._routing(tokens, examples.experts)
        yield "topk", routed
        yield "experts", experts

    def _activation(self, tokens: int, called: Sequence[str]) -> dict[str, Any] | None:
        op = next((op for op in ("silu_and_mul", "gelu_and_mul") if op in called), None)
        return None if op is None else self.key(op, self.empty(tokens, 2 * self._config.intermediate_size))

    def _routing(self, tokens: int, experts: ExpertWeights) -> tuple[dict[str, Any], dict[str, Any]]:
        c = self._config
        weights = torch.empty(tokens, c.experts_per_token, device=self._device)
        routed = (experts.gate_up, experts.down, weights, weights.int())
        logits = self.empty(tokens, c.num_experts)
        return (
            self.key("moe.topk", logits, c.experts_per_token, c.renormalize),
            self.key("fused_moe", self.empty(tokens, c.hidden_size), *routed),
        )

    def _attention(self, tokens: int, window: int) -> Iterator[tuple[str, dict[str, Any]]]:
        c = self._config
        query, _, _ = self._heads(tokens)
        lengths = torch.zeros(tokens, dtype=torch.int32, device=self._device)
        pages = lengths.view(tokens, 1)
        rest = attention_arguments(c.scale, window, c.attention_softcap)
        yield "decode", self.key("attention.decode", query, *self._caches(), lengths, pages, *rest)
        one = (lengths[:2], lengths[:1], pages[:1])
        yield "prefill", self.key("attention.prefill", query, *self._caches(), *one, *rest)

    def _heads(self, tokens: int) -> tuple[Tensor, ...]:
        c = self._config
        fused = self.empty(tokens, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        return fused.split_with_sizes([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)

    def _caches(self) -> list[Tensor]:
        shape = (1, self._page_size, self._config.num_kv_heads, self._config.head_dim)
        return [torch.empty(shape, dtype=self._kv_dtype, device=self._device) for _ in range(2)]

    def _linear(self, tokens: int, kind: LinearKey, weight: Weight) -> dict[str, Any]:
        scheme, (out_features, in_features), biased = kind
        bias = self.empty(out_features) if biased else None
        return self.key("linear", self.empty(tokens, in_features), weight.data, bias, scheme=scheme, prepack=True)

    def key(self, op_id: str, *args: Any, prepack: bool = False, **kwargs: Any) -> dict[str, Any]:
        """What to dispatch on: the facts of the example, less those that grow within the bucket."""
        facts = facts_of(op_id, args, kwargs)
        return {
            "op": op_id,
            "device": str(self._device),
            "dtype": facts.dtype,
            "scheme": facts.scheme,
            "dims": {name: size for name, size in facts.dims.items() if name not in AUTO_DIMS},
            "layout": facts.layout,
            "allow": get_op(op_id).numerics.roundings if self._allow else (),
            "prepack": prepack,
        }

    def empty(self, *shape: int) -> Tensor:
        """An example tensor of activations."""
        return torch.empty(shape, dtype=self._dtype, device=self._device)


Wrap = Callable[[Selected], Callable[..., Any]]
"""Turns a handle into what the decoder calls: the row itself, or the row under observation."""
