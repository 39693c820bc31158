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
from .weights import Weight

BUCKET_LIMITS: Final = (1, 8, 31)
"""Token counts that end a bucket: a single GEMV, few rows, more rows, and everything above."""

TOKEN_DIMS: Final = ("tokens", "sequences")
"""Names under which ops speak of the number of tokens."""

OPS: Final = (
    *("embedding", "rmsnorm", "fused_add_rmsnorm", "linear", "rope_kvcache_write"),
    *("attention.prefill", "attention.decode", "silu_and_mul"),
)
"""Every op that a decoder calls."""

Choose = Callable[..., Selected]
"""Binds a row as `dispatch(op=..., **facts)` does."""

LinearKey = tuple[str, tuple[int, int], bool]
"""What decides a linear's row beside the token count: scheme, (out_features, in_features), whether it has a bias."""


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
    """The bound rows of one bucket. attention: (decode row, prefill row)."""

    bucket: Bucket
    embedding: Selected
    rmsnorm: Selected
    head_norm: Selected | None
    fused_add_rmsnorm: Selected
    rope_write: Selected
    decode: Selected
    prefill: Selected
    activation: Selected
    linears: dict[LinearKey, Selected]

    def bindings(self) -> Iterator[tuple[str, str, Selected]]:
        """(bucket, op id, handle) of every row in the table."""
        single = (
            *(self.embedding, self.rmsnorm, self.head_norm, self.fused_add_rmsnorm, self.rope_write),
            *(self.decode, self.prefill, self.activation),
        )
        for handle in (*single, *self.linears.values()):
            if handle is not None:
                yield str(self.bucket), handle.spec.op, handle


def buckets(device: torch.device | None = None) -> tuple[Bucket, ...]:
    """Consecutive ranges from one token up, split wherever a row of any op of `OPS` starts or stops to fit, and where
    the records of times on `device` rank rows anew."""
    limits = set(BUCKET_LIMITS)
    if device is not None:
        limits |= timing_records.limits(OPS, TOKEN_DIMS, device.type, device.index)
    for op_id in OPS:
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


class Binder:
    """Chooses rows from example arguments of the model's own shapes, strides and dtypes.

    device, dtype: of the activations. allow_roundings: accept every intermediate rounding that an op permits, for
    speed. page_size: tokens in a page of the cache. choose: what binds a key, `dispatch` or a stand-in for it.
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
    ) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype
        self._allow = allow_roundings
        self._page_size = page_size
        self._choose = choose

    def table(self, bucket: Bucket, embedding: Weight, linears: dict[LinearKey, Weight], cos_sin: Tensor) -> OpTable:
        """Bind every op for `bucket`; `linears` holds one example of each kind of linear layer."""
        calls = self._calls(bucket, embedding, cos_sin)
        bound = {name: None if key is None else self._choose(**key) for name, key in calls.items()}
        rows = {kind: self._choose(**self._linear(bucket.low, kind, weight)) for kind, weight in linears.items()}
        return OpTable(bucket=bucket, linears=rows, **bound)  # type: ignore[arg-type]

    def keys(
        self, bucket: Bucket, embedding: Weight, linears: dict[LinearKey, Weight], cos_sin: Tensor
    ) -> list[dict[str, Any]]:
        """What `table` dispatches on, as `prepare` takes it."""
        calls = [key for key in self._calls(bucket, embedding, cos_sin).values() if key is not None]
        return [*calls, *(self._linear(bucket.low, kind, weight) for kind, weight in linears.items())]

    def _calls(self, bucket: Bucket, embedding: Weight, cos_sin: Tensor) -> dict[str, dict[str, Any] | None]:
        """The facts of every op but the linears, by the field of `OpTable` that its row goes to."""
        c, tokens = self._config, bucket.low
        hidden = self._empty(tokens, c.hidden_size)
        norm = torch.empty(c.hidden_size, device=self._device)
        fused = self._empty(tokens, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        query, key, value = fused.split_with_sizes([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        positions = torch.zeros(tokens, dtype=torch.int64, device=self._device)
        lengths = positions.int()
        caches = [self._empty(1, self._page_size, c.num_kv_heads, c.head_dim) for _ in range(2)]
        pages, scale = lengths.view(tokens, 1), c.head_dim**-0.5
        call = self._key
        return {
            "embedding": call("embedding", positions, embedding.data, dtype=self._dtype, scheme=embedding.scheme),
            "rmsnorm": call("rmsnorm", hidden, norm, c.rms_norm_eps),
            "head_norm": call("rmsnorm", query, norm[: c.head_dim], c.rms_norm_eps) if c.family.qk_norm else None,
            "fused_add_rmsnorm": call("fused_add_rmsnorm", hidden, hidden, norm, c.rms_norm_eps),
            "rope_write": call("rope_kvcache_write", query, key, value, *caches, positions, cos_sin, positions),
            "decode": call("attention.decode", query, *caches, lengths, pages, scale),
            "prefill": call("attention.prefill", query, *caches, lengths[:2], lengths[:1], pages[:1], scale),
            "activation": call("silu_and_mul", self._empty(tokens, 2 * c.intermediate_size)),
        }

    def _linear(self, tokens: int, kind: LinearKey, weight: Weight) -> dict[str, Any]:
        scheme, (out_features, in_features), biased = kind
        bias = self._empty(out_features) if biased else None
        return self._key("linear", self._empty(tokens, in_features), weight.data, bias, scheme=scheme, prepack=True)

    def _key(self, op_id: str, *args: Any, prepack: bool = False, **kwargs: Any) -> dict[str, Any]:
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

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


Wrap = Callable[[Selected], Callable[..., Any]]
"""Turns a handle into what the decoder calls: the row itself, or the row under observation."""
