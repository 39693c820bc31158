"""What to measure: calls by op, dtype, scheme and dimensions, and example arguments for each.

The arguments are dense, random and seeded. `extras` are sizes that an op's dimensions leave open: how many query heads
`rope` turns, how long the contexts of `attention.decode` are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import timing_records
from rapid_llm.verify.cases.build import torch_dtype
from rapid_llm.verify.formats import random_blocks

DENSE: Final = "unquantized"
DRAWN: Final = 16_777_259
"""Values that are drawn for one tensor; a prime."""

LIMIT: Final = 1 << 13
"""Positions in rotary tables."""

EXTRAS: Final = MappingProxyType({"hidden": 4096, "query_heads": 32, "kv_heads": 8, "length": 1024, "experts": 64})
"""What holds for a size that neither dimensions nor extras give."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call to measure. dims: the op's named dimensions. extras: other sizes, see `EXTRAS`."""

    op: str
    dtype: str
    scheme: str | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    extras: Mapping[str, int] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        sizes = [f"{name}={size}" for name, size in (*self.dims.items(), *self.extras.items())]
        return " ".join([self.op, self.dtype, *([self.scheme] if self.scheme else []), *sizes])

    def size(self, name: str) -> int:
        """A dimension, or what the call leaves open."""
        return int({**EXTRAS, **self.extras, **self.dims}[name])

    def values(self, device: str, seed: int = 0) -> dict[str, Any]:
        """Arguments by their schema names, on `device`."""
        make = _MAKERS.get(self.op)
        if make is None:
            raise ValueError(
                f"{self.op}: no example arguments are known; measure it with rapid_llm.bench.compare, or add a maker "
                "to rapid_llm/tuning/calls.py"
            )
        missing = [name for name in timing_records.dims_of(registry.get_op(self.op)) if name not in self.dims]
        if missing:
            raise ValueError(f"{self.op}: {missing[0]} is not given; give --dim {missing[0]}=N")
        made = make(torch.Generator().manual_seed(seed), self)
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in made.items()}


def _normal(g: torch.Generator, dtype: str, *shape: int, spread: float = 1.0) -> Tensor:
    """Normal values; of a huge tensor no more than `DRAWN` are drawn, and repeated: a prime, so that rows differ."""
    count = math.prod(shape)
    values = torch.randn(min(count, DRAWN), generator=g) * spread
    narrow = values.to(torch_dtype(dtype))
    return (narrow if count <= DRAWN else narrow.repeat(-(-count // DRAWN))[:count]).view(shape)


def _rotary(dim: int) -> Tensor:
    angles = torch.arange(LIMIT)[:, None] / 10000.0 ** (torch.arange(0, dim, 2) / dim)
    return torch.cat([angles.cos(), angles.sin()], 1).float()


def _scale(g: torch.Generator, c: Call) -> dict[str, Any]:
    return {"input": _normal(g, c.dtype, c.size("numel")), "factor": 0.3}


def _rmsnorm(g: torch.Generator, c: Call) -> dict[str, Any]:
    hidden = c.size("hidden")
    return {"input": _normal(g, c.dtype, c.size("tokens"), hidden), "weight": _normal(g, "fp32", hidden)}


def _fused_add_rmsnorm(g: torch.Generator, c: Call) -> dict[str, Any]:
    return {**_rmsnorm(g, c), "residual": _normal(g, c.dtype, c.size("tokens"), c.size("hidden"))}


def _silu_and_mul(g: torch.Generator, c: Call) -> dict[str, Any]:
    return {"input": _normal(g, c.dtype, c.size("tokens"), 2 * c.size("features"))}


def _linear(g: torch.Generator, c: Call) -> dict[str, Any]:
    outputs, inputs, scheme = c.size("out_features"), c.size("in_features"), c.scheme or DENSE
    dense = scheme == DENSE
    weight = _normal(g, c.dtype, outputs, inputs, spread=0.05) if dense else random_blocks(g, outputs, inputs, scheme)
    bias = _normal(g, c.dtype, outputs) if c.size("biased") else None
    return {"input": _normal(g, c.dtype, c.size("tokens"), inputs), "weight": weight, "bias": bias, "scheme": scheme}


def _linear_add(g: torch.Generator, c: Call) -> dict[str, Any]:
    tokens, outputs, inputs = c.size("tokens"), c.size("out_features"), c.size("in_features")
    return {
        "input": _normal(g, c.dtype, tokens, inputs),
        "weight": _normal(g, c.dtype, outputs, inputs, spread=0.05),
        "residual": _normal(g, c.dtype, tokens, outputs),
    }


def _rmsnorm_linear(g: torch.Generator, c: Call) -> dict[str, Any]:
    """Without an activation the outputs of the op are those of the weight."""
    gated = c.op == "rmsnorm_linear_silu_and_mul"
    outputs, inputs = 2 * c.size("intermediate") if gated else c.size("out_features"), c.size("in_features")
    made = {
        "input": _normal(g, c.dtype, c.size("tokens"), inputs),
        "norm_weight": _normal(g, "fp32", inputs),
        "weight": _normal(g, c.dtype, outputs, inputs, spread=0.05),
    }
    return made if gated else {**made, "bias": _normal(g, c.dtype, outputs) if c.size("biased") else None}


def _embedding(g: torch.Generator, c: Call) -> dict[str, Any]:
    vocab, hidden, scheme = c.size("vocab"), c.size("hidden"), c.scheme or DENSE
    ids = torch.randint(0, vocab, (c.size("tokens"),), generator=g)
    dense = scheme == DENSE
    weight = _normal(g, c.dtype, vocab, hidden) if dense else random_blocks(g, vocab, hidden, scheme)
    made = {"input": ids, "weight": weight, "scheme": scheme}
    return made if dense else {**made, "dtype": torch.float32}


def _rope(g: torch.Generator, c: Call) -> dict[str, Any]:
    tokens, dim = c.size("tokens"), c.size("head_dim")
    return {
        "query": _normal(g, c.dtype, tokens, c.size("query_heads"), dim),
        "key": _normal(g, c.dtype, tokens, c.size("kv_heads"), dim),
        "positions": torch.randint(0, LIMIT, (tokens,), generator=g),
        "cos_sin_cache": _rotary(c.size("rotary_dim")),
    }


def _kvcache_write(g: torch.Generator, c: Call) -> dict[str, Any]:
    tokens, page = c.size("tokens"), c.size("page_size")
    heads, dim = c.size("kv_heads"), c.size("head_dim")
    pages = max(-(-2 * tokens // page), 64)
    return {
        "key": _normal(g, c.dtype, tokens, heads, dim),
        "value": _normal(g, c.dtype, tokens, heads, dim),
        "k_cache": _normal(g, c.dtype, pages, page, heads, dim),
        "v_cache": _normal(g, c.dtype, pages, page, heads, dim),
        "slot_mapping": torch.randperm(pages * page, generator=g)[:tokens],
    }


def _rope_kvcache_write(g: torch.Generator, c: Call) -> dict[str, Any]:
    return {**_kvcache_write(g, c), **_rope(g, c)}


def _paged(g: torch.Generator, c: Call, sequences: int, length: int) -> dict[str, Any]:
    """Caches whose pages are scattered, and their tables."""
    page, each = c.size("page_size"), -(-length // c.size("page_size"))
    cache = (sequences * each, page, c.size("kv_heads"), c.size("head_dim"))
    return {
        "k_cache": _normal(g, c.dtype, *cache),
        "v_cache": _normal(g, c.dtype, *cache),
        "seq_lens": torch.full((sequences,), length, dtype=torch.int32),
        "block_table": torch.randperm(sequences * each, generator=g).view(sequences, each).to(torch.int32),
        "scale": c.size("head_dim") ** -0.5,
    }


def _decode(g: torch.Generator, c: Call) -> dict[str, Any]:
    sequences = c.size("sequences")
    query = _normal(g, c.dtype, sequences, c.size("query_heads"), c.size("head_dim"))
    return {"query": query, **_paged(g, c, sequences, c.size("length"))}


def _prefill(g: torch.Generator, c: Call) -> dict[str, Any]:
    tokens, sequences = c.size("tokens"), c.size("sequences")
    ends = torch.arange(sequences + 1) * tokens // sequences
    made = _paged(g, c, sequences, max(c.extras.get("length", 0), -(-tokens // sequences)))
    query = _normal(g, c.dtype, tokens, c.size("query_heads"), c.size("head_dim"))
    return {"query": query, **made, "cu_seqlens_q": ends.to(torch.int32)}


def _mla_decode(g: torch.Generator, c: Call) -> dict[str, Any]:
    made = _decode(g, Call(c.op, c.dtype, None, {**c.dims, "kv_heads": 1}, c.extras))
    made["kv_cache"] = made.pop("k_cache")
    del made["v_cache"]
    return {**made, "scale": 192**-0.5, "value_dim": c.size("value_dim")}


def _sample(g: torch.Generator, c: Call) -> dict[str, Any]:
    rows = c.size("rows")
    return {
        "logits": _normal(g, c.dtype, rows, c.size("vocab"), spread=3.0),
        "temperature": torch.rand(rows, generator=g) + 0.5,
        "top_k": torch.full((rows,), -1, dtype=torch.int32),
        "top_p": torch.ones(rows),
        "min_p": torch.zeros(rows),
        "uniform": torch.rand(rows, generator=g),
    }


def _topk(g: torch.Generator, c: Call) -> dict[str, Any]:
    return {"logits": _normal(g, c.dtype, c.size("tokens"), c.size("experts")), "k": c.size("topk")}


def _fused_moe(g: torch.Generator, c: Call) -> dict[str, Any]:
    """Every token's experts by themselves at random, none twice."""
    tokens, hidden, inter, experts, topk = map(c.size, ("tokens", "hidden", "intermediate", "experts", "topk"))
    return {
        "input": _normal(g, c.dtype, tokens, hidden),
        "gate_up": _normal(g, c.dtype, experts, 2 * inter, hidden, spread=0.05),
        "down": _normal(g, c.dtype, experts, hidden, inter, spread=0.05),
        "topk_weights": torch.rand(tokens, topk, generator=g),
        "topk_ids": torch.rand(tokens, experts, generator=g).argsort(1)[:, :topk].to(torch.int32).contiguous(),
    }


def _alone(c: Call) -> None:
    if c.size("ranks") != 1:
        raise ValueError(f"{c.op}: {c.size('ranks')} ranks need as many processes; only ranks=1 is measured here")


def _comm_dispatch(g: torch.Generator, c: Call) -> dict[str, Any]:
    _alone(c)
    tokens, hidden, topk, rows = c.size("tokens"), c.size("hidden"), c.size("topk"), c.size("capacity")
    experts = c.size("experts")
    return {
        "input": _normal(g, c.dtype, tokens, hidden),
        "topk_ids": torch.rand(tokens, experts, generator=g).argsort(1)[:, :topk].contiguous(),
        "topk_weights": torch.rand(tokens, topk, generator=g),
        "recv": _normal(g, c.dtype, rows, hidden),
        "recv_ids": torch.zeros(rows, topk, dtype=torch.int64),
        "recv_weights": torch.rand(rows, topk, generator=g),
        "recv_source": torch.zeros(rows, 2, dtype=torch.int32),
        "num_experts": experts,
    }


def _comm_combine(g: torch.Generator, c: Call) -> dict[str, Any]:
    _alone(c)
    rows, tokens = c.size("capacity"), c.size("tokens")
    source = torch.stack([torch.zeros(rows), torch.arange(rows) % max(tokens, 1)], 1).to(torch.int32)
    return {"input": _normal(g, c.dtype, rows, c.size("hidden")), "recv_source": source, "tokens": tokens}


_MAKERS: Final[Mapping[str, Callable[[torch.Generator, Call], dict[str, Any]]]] = MappingProxyType(
    {
        "scale": _scale,
        "rmsnorm": _rmsnorm,
        "fused_add_rmsnorm": _fused_add_rmsnorm,
        "silu_and_mul": _silu_and_mul,
        "gelu_and_mul": _silu_and_mul,
        "linear": _linear,
        "linear_add": _linear_add,
        "rmsnorm_linear": _rmsnorm_linear,
        "rmsnorm_linear_silu_and_mul": _rmsnorm_linear,
        "embedding": _embedding,
        "rope": _rope,
        "kvcache.write": _kvcache_write,
        "rope_kvcache_write": _rope_kvcache_write,
        "attention.decode": _decode,
        "attention.prefill": _prefill,
        "attention.mla_decode": _mla_decode,
        "sample": _sample,
        "moe.topk": _topk,
        "fused_moe": _fused_moe,
        "comm.dispatch": _comm_dispatch,
        "comm.combine": _comm_combine,
    }
)
