"""Which calls to measure: those of a decision trace, of a loaded model, of a model's sizes, or of one op.

Sizes that change from step to step (tokens, sequences, rows) are taken on both sides of every limit that a row states,
so that a row is never ranked only where it does best.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import timing_records

from .calls import DENSE, Call

COUNTS: Final = ("tokens", "sequences", "rows")
"""Dimensions that change from step to step."""

SIZES: Final = (1, 8, 64, 512, 4096)
QUICK_SIZES: Final = (1, 64)
LENGTHS: Final = (256, 4096)
"""Lengths of contexts: no dimension says them, so they are measured in turn and merged."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a decoder that decide what its ops work on."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    page_size: int = 16


MODELS: Final = MappingProxyType(
    {
        "smollm2-135m": ModelSizes(576, 1536, 9, 3, 64, 49152),
        "llama3.2-1b": ModelSizes(2048, 8192, 32, 8, 64, 128256),
        "llama3-8b": ModelSizes(4096, 14336, 32, 8, 128, 128256),
    }
)
"""Sizes that can be measured without the model."""


def around_limits(op_id: str, sizes: Iterable[int], most: int, device: str) -> tuple[int, ...]:
    """`sizes`, and the last size within and the first beyond every limit that a row of the op states for a count; of
    rows that are for the kind of `device`."""
    kind = device.partition(":")[0]
    found = set(sizes)
    for row in registry.rows(op_id):
        if kind not in (row.devices or (("cuda",) if row.capability else (kind,))):
            continue
        for dim in (*row.shape.require, *row.shape.prefer):
            if dim.name in COUNTS:
                found |= set() if dim.max is None else {dim.max, dim.max + 1}
                found |= set() if dim.min is None else {dim.min - 1, dim.min}
    return tuple(sorted(size for size in found if 1 <= size <= most))


def of_model(
    sizes: ModelSizes,
    ops: Sequence[str],
    dtypes: Sequence[str],
    schemes: Sequence[str],
    device: str,
    *,
    quick: bool = False,
) -> Iterator[Call]:
    """The calls that a decoder of these sizes makes of `ops`; schemes: of its linear layers."""
    for op_id in ops:
        counts = around_limits(op_id, QUICK_SIZES if quick else SIZES, max(SIZES), device)
        if quick:
            counts = tuple(sorted({*QUICK_SIZES, *counts[:1]}))
        for dtype in dtypes:
            for scheme in _schemes(op_id, schemes):
                for dims, extras in _dims(op_id, sizes, counts, quick):
                    yield Call(op_id, _dtype(op_id, dtype, scheme), scheme, dims, extras)


def _schemes(op_id: str, schemes: Sequence[str]) -> tuple[str | None, ...]:
    known = registry.get_op(op_id).schemes
    return tuple(s for s in known if s in schemes) or known[:1] if known else (None,)


def _dtype(op_id: str, dtype: str, scheme: str | None) -> str:
    """An op whose dtype is its weight's has that of the blocks of a quantised one."""
    return "uint8" if op_id == "embedding" and scheme not in (None, DENSE) else dtype


def _dims(
    op_id: str, m: ModelSizes, counts: Sequence[int], quick: bool
) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """(dimensions, extras) of every call of an op in a model."""
    heads = {"kv_heads": m.kv_heads, "head_dim": m.head_dim, "page_size": m.page_size}
    asked = {"query_heads": m.heads}
    linears = (
        ((m.heads + 2 * m.kv_heads) * m.head_dim, m.hidden),
        (m.hidden, m.heads * m.head_dim),
        (2 * m.intermediate, m.hidden),
        (m.hidden, m.intermediate),
    )
    lengths = LENGTHS[-1:] if quick else LENGTHS
    for n in counts:
        if op_id in ("rmsnorm", "fused_add_rmsnorm"):
            yield {"tokens": n, "hidden": m.hidden}, {}
        elif op_id in ("silu_and_mul", "gelu_and_mul"):
            yield {"tokens": n, "features": m.intermediate}, {}
        elif op_id == "scale":
            yield {"numel": n * m.hidden}, {}
        elif op_id == "embedding":
            yield {"tokens": n, "vocab": m.vocab}, {"hidden": m.hidden}
        elif op_id == "linear":
            for outputs, inputs in linears:
                yield {"tokens": n, "in_features": inputs, "out_features": outputs, "biased": 0}, {}
            if n <= 64:  # a step makes logits for one token a request
                yield {"tokens": n, "in_features": m.hidden, "out_features": m.vocab, "biased": 0}, {}
        elif op_id == "linear_add":
            for outputs, inputs in (linears[1], linears[3]):
                yield {"tokens": n, "in_features": inputs, "out_features": outputs}, {}
        elif op_id == "rmsnorm_linear":
            yield {"tokens": n, "in_features": m.hidden, "out_features": linears[0][0], "biased": 0}, {}
        elif op_id == "rmsnorm_linear_silu_and_mul":
            yield {"tokens": n, "in_features": m.hidden, "intermediate": m.intermediate}, {}
        elif op_id == "rope":
            yield {"tokens": n, "head_dim": m.head_dim, "rotary_dim": m.head_dim}, {**asked, "kv_heads": m.kv_heads}
        elif op_id == "kvcache.write":
            yield {"tokens": n, **heads}, {}
        elif op_id == "rope_kvcache_write":
            yield {"tokens": n, "rotary_dim": m.head_dim, **heads}, asked
        elif op_id == "attention.decode" and n <= 64:
            for length in lengths:
                yield {"sequences": n, **asked, **heads}, {"length": length}
        elif op_id == "attention.prefill":
            yield {"tokens": n, "sequences": 1, **asked, **heads}, {}
        elif op_id == "attention.mla_decode" and n <= 64:
            latent = {"query_heads": 16, "head_dim": 576, "value_dim": 512, "page_size": 64}
            yield {"sequences": n, **latent}, {"length": 1024}
        elif op_id == "sample" and n <= 64:
            yield {"rows": n, "vocab": m.vocab}, {}
        elif op_id == "moe.topk":
            yield {"tokens": n, "experts": 128, "topk": 8}, {}
        elif op_id == "fused_moe":
            yield {"tokens": n, "hidden": 2048, "intermediate": 768, "experts": 128, "topk": 8}, {}
        elif op_id == "comm.dispatch":
            yield {"tokens": n, "hidden": m.hidden, "topk": 8, "capacity": n, "ranks": 1}, {}
        elif op_id == "comm.combine":
            yield {"tokens": n, "hidden": m.hidden, "capacity": n, "ranks": 1}, {}


def of_trace(path: Path) -> list[Call]:
    """The calls of a decision trace (RAPID_LLM_TRACE), most frequent first; raises `ValueError` if it is none."""
    try:
        entries = json.loads(path.read_text())["decisions"]
        counted = [(entry["key"], int(entry["count"])) for entry in entries]
        return of_keys(key for key, _ in sorted(counted, key=lambda e: -e[1]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--trace {path}: not a trace that RAPID_LLM_TRACE wrote ({error})") from error


def of_keys(keys: Iterable[Mapping[str, Any]]) -> list[Call]:
    """The calls that keys of decisions (`Facts.as_json`) speak of, once each; keys without all dimensions are none, nor
    are those with unusual ones, of which no times are kept."""
    found: dict[str, Call] = {}
    for key in keys:
        op = registry.get_op(key["op"])
        names = timing_records.dims_of(op)
        dims = {name: int(key["dims"][name]) for name in names if name in key["dims"]}
        if any(key["dims"].get(name, values[0]) not in values for name, values in op.usual.items()):
            continue
        if len(dims) == len(names) and all(dims.values() or [0]) and key["dtype"]:
            call = Call(op.id, key["dtype"], key["scheme"], dims, _left_open(op.id, key["dims"]))
            found.setdefault(str(call), call)
    return list(found.values())


def to_the_limits(calls: Iterable[Call], last: int = 512) -> list[Call]:
    """`calls`, and for each the largest size before the next larger call that differs from it in a count alone; `last`
    beyond the largest. A model binds a row for a range of counts by its lowest; this is the other end."""
    listed = list(calls)
    found = dict.fromkeys(listed)
    for call in listed:
        for name in COUNTS:
            if name not in call.dims or (name == "sequences" and "tokens" in call.dims):
                continue
            alike = [c.dims[name] for c in listed if _but(c, name) == _but(call, name)]
            end = min((size for size in alike if size > call.dims[name]), default=max(last, call.dims[name]) + 1) - 1
            found.setdefault(replace(call, dims={**call.dims, name: end}))
    return list(found)


def _but(call: Call, name: str) -> str:
    return str(replace(call, dims={**call.dims, name: 0}) if name in call.dims else "")


def _left_open(op_id: str, dims: Mapping[str, int]) -> dict[str, int]:
    """What of the extras the element counts of a traced call tell."""
    if op_id == "embedding" and dims.get("numel") and dims.get("vocab"):
        return {"hidden": max(dims["numel"] // dims["vocab"], 1)}
    return {}
