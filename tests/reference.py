"""The oracles, for tests, and a second formulation of each that shares nothing with the first.

`oracle(op_id)` is what tests compare rows with. `second(op_id)` computes the same in numpy or plain Python by another
route: complex multiplication for rope, tanh for silu, `math.fsum` for sums, exact fractions for sampling. The two are
compared in `tests/verify/test_oracles.py`, so that a slip in one shows.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import probes
from tests import reference_formats

Array = np.ndarray[Any, np.dtype[np.float64]]


def oracle(op_id: str) -> Callable[..., Any]:
    """The float64 oracle of an op, called with its arguments by name."""
    return probes.load(registry.get_op(op_id).oracle)


def second(op_id: str) -> Callable[..., Any]:
    """Another formulation of the same, giving numpy arrays (a tuple for in-place ops; ids for `sample`)."""
    return globals()[f"_{op_id.replace('.', '_')}"]


def _np(tensor: Tensor) -> Array:
    return tensor.detach().to(torch.float64).numpy().copy()


def _scale(input: Tensor, factor: float) -> Array:
    flat = [x * factor for x in _np(input).reshape(-1).tolist()]
    return np.array(flat).reshape(input.shape)


def _silu_and_mul(input: Tensor) -> Array:
    x = _np(input)
    half = x.shape[-1] // 2
    gate, up = x[..., :half], x[..., half:]
    with np.errstate(all="ignore"):
        # z / (1 + exp(-z)) = z (1 + tanh(z / 2)) / 2, and z exp(z) / (1 + exp(z)) where that cancels
        rising = gate * 0.5 * (1.0 + np.tanh(gate / 2))
        falling = gate * np.exp(np.minimum(gate, 0)) / (1.0 + np.exp(np.minimum(gate, 0)))
        return np.where(gate < 0, falling, rising) * up


def _gelu_and_mul(input: Tensor) -> Array:
    x = _np(input)
    half = x.shape[-1] // 2
    gate, up = x[..., :half], x[..., half:]
    with np.errstate(all="ignore"):
        u = np.sqrt(2 / np.pi) * gate * (1 + 0.044715 * gate * gate)
        # 0.5 z (1 + tanh u), and where that cancels z exp(2 u) / (1 + exp(2 u))
        small = np.exp(2 * np.minimum(u, 0))
        return np.where(gate < 0, gate * small / (1 + small), 0.5 * gate * (1 + np.tanh(u))) * up


def _norm(x: Array, weight: Array, eps: float) -> Array:
    rows = x.reshape(-1, x.shape[-1]) if x.size else x.reshape(0, x.shape[-1])
    result = np.empty_like(rows)
    with np.errstate(all="ignore"):
        for i, row in enumerate(rows):
            finite = bool(np.isfinite(row).all())
            squares = math.fsum(float(v) ** 2 for v in row) if finite else float((row * row).sum())
            width = np.float64(row.size)
            result[i] = row * np.sqrt(width) / np.sqrt(squares + width * eps) * weight
    return result.reshape(x.shape)


def _rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Array:
    return _norm(_np(input), _np(weight), eps)


def _fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Array, Array]:
    total = _np(residual) + _np(input)
    return _norm(total, _np(weight), eps), total


def _rope(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> tuple[Array, Array]:
    rotary = cos_sin_cache.shape[-1]
    half = rotary // 2
    result = []
    for tensor in (query, key):
        x = _np(tensor)
        for token, position in enumerate(positions.tolist()):
            row = _np(cos_sin_cache[position])
            for i in range(half):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                cos, sin = row[i], row[half + i]
                for head in range(x.shape[1]):
                    turned = complex(x[token, head, a], x[token, head, b]) * complex(cos, sin)
                    x[token, head, a], x[token, head, b] = turned.real, turned.imag
        result.append(x)
    return result[0], result[1]


def blocks(row: bytes, scheme: str) -> list[float]:
    """One row of GGUF blocks, weight by weight, as the format is written down."""
    values: list[float] = []
    if scheme == "fp8_block128":
        return _fp8_row(row)
    if scheme not in ("q8_0", "q4_0", "q4_1"):
        return reference_formats.row(row, scheme)
    if scheme == "q8_0":
        for start in range(0, len(row), 34):
            (d,) = struct.unpack_from("<e", row, start)
            values += [d * q for q in struct.unpack_from("<32b", row, start + 2)]
        return values
    size, head = (18, "<e") if scheme == "q4_0" else (20, "<ee")
    for start in range(0, len(row), size):
        d, *rest = struct.unpack_from(head, row, start)
        codes = row[start + struct.calcsize(head) : start + size]
        for nibble in [c & 15 for c in codes] + [c >> 4 for c in codes]:
            values.append(d * (nibble - 8) if scheme == "q4_0" else d * nibble + rest[0])
    return values


def _fp8_row(row: bytes) -> list[float]:
    """Codes, a scale for each 128 of them, padding to a multiple of 16 bytes."""
    groups = next(n for n in range(len(row) // 128 + 1) if 128 * n + -(-4 * n // 16) * 16 == len(row))
    scales = struct.unpack_from(f"<{groups}f", row, 128 * groups)
    return [scales[i // 128] * reference_formats.e4m3(code) for i, code in enumerate(row[: 128 * groups])]


def _matrix(weight: Tensor, scheme: str) -> Array:
    if scheme == "unquantized":
        return _np(weight)
    return np.array([blocks(bytes(row.tolist()), scheme) for row in weight])


def _embedding(input: Tensor, weight: Tensor, dtype: Any = None, scheme: str = "unquantized") -> Array:
    del dtype
    table = _matrix(weight, scheme)
    hidden = table.shape[1]
    rows = [table[i] if 0 <= i < len(table) else np.zeros(hidden) for i in input.reshape(-1).tolist()]
    return np.array(rows).reshape(*input.shape, hidden)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, scheme: str = "unquantized") -> Array:
    x = _np(input).reshape(-1, input.shape[-1])
    w = _matrix(weight, scheme)
    result = np.empty((x.shape[0], w.shape[0]))
    with np.errstate(all="ignore"):
        for i in range(x.shape[0]):
            for j in range(w.shape[0]):
                terms = x[i] * w[j]
                finite = bool(np.isfinite(terms).all())
                result[i, j] = math.fsum(terms.tolist()) if finite else float(terms.sum())
                if bias is not None:
                    result[i, j] += float(bias[j])
    return result.reshape(*input.shape[:-1], w.shape[0])


def _kvcache_write(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, exact_key: bool = False
) -> tuple[Array, Array]:
    result, sources = [], reference_formats.held(_np(key), _np(value), k_cache, exact_key=exact_key)
    for source, cache in zip(sources, (k_cache, v_cache), strict=True):
        rows = _np(cache).reshape(-1, *cache.shape[2:])
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                rows[slot] = source[token]
        result.append(rows.reshape(cache.shape))
    return result[0], result[1]


def _rope_kvcache_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
) -> tuple[Array, ...]:
    turned_query, turned_key = _rope(query, key, positions, cos_sin_cache, interleaved)
    caches = _kvcache_write(torch.from_numpy(turned_key), value, k_cache, v_cache, slot_mapping, exact_key=True)
    return turned_query, turned_key, *caches


def _attend(query: Array, keys: list[Array], values: list[Array], scale: float, softcap: float = 0.0) -> Array:
    """One query token (heads, dim) by a softmax that runs over the keys one at a time."""
    heads, dim = query.shape
    result = np.zeros((heads, dim))
    group = heads // keys[0].shape[0] if keys else 1
    with np.errstate(all="ignore"):
        for head in range(heads):
            top, total, acc = -math.inf, 0.0, np.zeros(dim)
            for k, v in zip(keys, values, strict=True):
                score = float((query[head] * k[head // group]).sum()) * scale
                if softcap and not math.isnan(score):  # c tanh(s / c) = c (1 - e) / (1 + e) with e = exp(-2 |s| / c)
                    rest = -math.expm1(-2 * abs(score) / softcap)
                    score = math.copysign(softcap * rest / (2 - rest), score)
                new = score if math.isnan(score) else max(top, score)
                decay = 0.0 if top == -math.inf else math.exp(top - new)
                weight = math.exp(score - new)
                total, acc = total * decay + weight, acc * decay + weight * v[head // group]
                top = new
            result[head] = acc / total if keys else 0.0
    return result


def _attention_prefill(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Array:
    q, result = _np(query), np.zeros(query.shape)
    page = k_cache.shape[1]
    for s, length in enumerate(seq_lens.tolist()):
        begin, end = int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1])
        rows = [(int(block_table[s, j // page]), j % page) for j in range(length)]
        keys, values = [_np(k_cache[r]) for r in rows], [_np(v_cache[r]) for r in rows]
        for token in range(begin, end):
            seen = max(length - (end - token) + 1, 0)
            first = max(seen - window, 0) if window else 0
            result[token] = _attend(q[token], keys[first:seen], values[first:seen], scale, softcap)
    return result


def _attention_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Array:
    starts = torch.arange(query.shape[0] + 1)
    return _attention_prefill(query, k_cache, v_cache, starts, seq_lens, block_table, scale, window, softcap)


def _attention_mla_decode(
    query: Tensor, kv_cache: Tensor, seq_lens: Tensor, block_table: Tensor, scale: float, value_dim: int = 512
) -> Array:
    """Every weight is its exponential against the log of the sum of all."""
    result = np.zeros((*query.shape[:2], value_dim))
    page = kv_cache.shape[1]
    for s, length in enumerate(seq_lens.tolist()):
        rows = [_np(kv_cache[int(block_table[s, j // page]), j % page, 0]) for j in range(length)]
        for head in range(query.shape[1] if length else 0):
            scores = np.array([float((_np(query[s, head]) * row).sum()) * scale for row in rows])
            log_sum = scores.max() + math.log(math.fsum(math.exp(v) for v in scores - scores.max()))
            for weight, row in zip(np.exp(scores - log_sum), rows, strict=True):
                result[s, head] += weight * row[:value_dim]
    return result


def _linear_add(input: Tensor, weight: Tensor, residual: Tensor) -> tuple[Array]:
    """The residual as one term more of every sum."""
    x = _np(input).reshape(-1, input.shape[-1])
    kept = _np(residual).reshape(-1, residual.shape[-1])
    with np.errstate(all="ignore"):
        rows = [
            [_sum([*(a * b).tolist(), r]) for b, r in zip(_np(weight), own, strict=True)]
            for a, own in zip(x, kept, strict=True)
        ]
    return (np.array(rows).reshape(residual.shape),)


def _sum(terms: list[float]) -> float:
    return math.fsum(terms) if all(map(math.isfinite, terms)) else float(np.sum(terms))


def _rmsnorm_linear(
    input: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6
) -> Array:
    """The norm's weight goes into the matrix, and its root into the finished sums."""
    x, matrix = _np(input).reshape(-1, input.shape[-1]), _np(weight) * _np(norm_weight)
    with np.errstate(all="ignore"):
        roots = [math.sqrt(_sum((row * row).tolist()) / max(len(row), 1) + eps) for row in x]
        sums = [[_sum((row * column).tolist()) / root for column in matrix] for row, root in zip(x, roots, strict=True)]
        result = np.array(sums).reshape(*input.shape[:-1], len(matrix))
        return result if bias is None else result + _np(bias)


def _rmsnorm_linear_silu_and_mul(input: Tensor, norm_weight: Tensor, weight: Tensor, eps: float = 1e-6) -> Array:
    return _silu_and_mul(torch.from_numpy(_rmsnorm_linear(input, norm_weight, weight, None, eps)))


def _moe_topk(logits: Tensor, k: int, renormalize: bool = True) -> tuple[Array, Array]:
    """A sort of pairs, and logarithms of sums."""
    weights, ids = np.zeros((len(logits), k)), np.zeros((len(logits), k))
    for token, row in enumerate(_np(logits).tolist()):
        ranked = sorted(range(len(row)), key=lambda i: (-row[i] if not math.isnan(row[i]) else math.inf, i))[:k]
        ids[token] = ranked
        top = max(row)
        if any(math.isnan(x) or x == math.inf for x in row) or top == -math.inf:
            weights[token] = math.nan
            continue
        among = [row[i] for i in ranked] if renormalize else row
        log_sum = top + math.log(math.fsum(math.exp(x - top) for x in among))
        weights[token] = [math.exp(row[i] - log_sum) for i in ranked]
    return weights, ids


def _fused_moe(input: Tensor, gate_up: Tensor, down: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Array:
    """Expert by expert, over the tokens that chose it; silu as in silu_and_mul."""
    x, result = _np(input), np.zeros(input.shape)
    for expert in range(gate_up.shape[0]):
        for token, j in np.argwhere(topk_ids.numpy() == expert):
            both = torch.from_numpy(_np(gate_up[expert]) @ x[token])
            hidden = _silu_and_mul(both[None])[0]
            result[token] += _np(topk_weights)[token, j] * (_np(down[expert]) @ hidden)
    return result


def _comm_dispatch(
    input: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    recv: Tensor,
    recv_ids: Tensor,
    recv_weights: Tensor,
    recv_source: Tensor,
    **world: Any,
) -> tuple[Array, ...]:
    """One rank: a selection of rows by a mask."""
    assert world["ranks"] == 1
    chosen = topk_ids.numpy() >= 0
    kept = np.flatnonzero(chosen.sum(1))
    rest = recv.shape[0] - len(kept)
    ids = np.where(chosen, topk_ids.numpy(), -1)[kept]
    weights = np.where(chosen, _np(topk_weights), 0.0)[kept]
    source = np.stack((np.zeros(len(kept)), kept), axis=1)

    def filled(rows: Array, value: float) -> Array:
        return np.concatenate((rows, np.full((rest, rows.shape[1]), value))).astype(np.float64)

    moved = np.concatenate((_np(input)[kept], _np(recv)[len(kept) :]))
    return moved, filled(ids, -1), filled(weights, 0), filled(source, -1)


def _comm_combine(input: Tensor, recv_source: Tensor, tokens: int, **world: Any) -> Array:
    """One rank: each token looks for its rows."""
    assert world["ranks"] == 1
    x, sources = _np(input), recv_source.tolist()
    rows = [[r for r, source in enumerate(sources) if source == [0, token]] for token in range(tokens)]
    return np.array([x[r].sum(0) for r in rows]).reshape(tokens, input.shape[1])


def _sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> list[int]:
    columns = (t.tolist() for t in (logits, temperature, top_k, top_p, min_p, uniform))
    return [_choose(*row) for row in zip(*columns, strict=True)]


def _choose(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """The op's sentence, taken literally, in exact fractions of float64 exponentials."""
    top = max(logits, default=math.nan)
    if any(math.isnan(v) or v == math.inf for v in logits) or top == -math.inf:
        return -1
    if temperature == 0:
        return logits.index(top)
    mass = [Fraction(math.exp((v - top) / temperature)) if v > -math.inf else Fraction(0) for v in logits]
    keep = [i for i, m in enumerate(mass) if m > 0]
    if 0 < top_k < len(logits):
        kth = sorted(logits, reverse=True)[top_k - 1]
        keep = [i for i in keep if logits[i] >= kth]
    if top_p < 1:
        whole = sum(mass[i] for i in keep)
        ranked = sorted(keep, key=lambda i: logits[i], reverse=True)
        gathered, last = Fraction(0), ranked[0]
        for i in ranked:
            last = i
            gathered += mass[i]
            if gathered >= Fraction(top_p) * whole:
                break
        keep = [i for i in keep if logits[i] >= logits[last]]
    keep = [i for i in keep if mass[i] >= Fraction(min_p)]
    target = Fraction(uniform) * sum(mass[i] for i in keep)
    gathered = Fraction(0)
    for i in keep:
        gathered += mass[i]
        if gathered > target:
            return i
    raise AssertionError("the kept mass exceeds any uniform below 1")
