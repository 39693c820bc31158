"""One slow, plain fp32 row for every op, each of which can be told to make a fault.

Without `fault` they are right, and the suite must say so; with one of the names that they test for they are wrong in
the way in which real kernels have been wrong, and the suite must say that too (`rapid_llm.verify.faulty`). They share
no code with the oracles, and none with the rows that ship.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import BLOCK, BLOCK_BYTES, FP8, row_elements
from rapid_llm.kernels.registry import ArgumentError
from rapid_llm.verify import plain_formats


def give(result: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A fresh tensor of `dtype`, or `out`, with the result in it."""
    if out is None:
        return result.to(dtype).contiguous()
    return out.copy_(result)


def scale(input: Tensor, factor: float, out: Tensor | None = None, *, fault: str = "") -> Tensor:
    shares = out is not None and out.untyped_storage().data_ptr() == input.untyped_storage().data_ptr()
    if shares and out is not input and fault != "accepts overlap":
        raise ArgumentError("scale: out overlaps input; pass input itself or separate memory")
    return give(input.float() * factor, out, input.dtype)


def silu_and_mul(input: Tensor, out: Tensor | None = None, *, fault: str = "") -> Tensor:
    gate, up = input.float().chunk(2, dim=-1)
    if fault == "halves swapped":
        gate, up = up, gate
    if fault == "gelu":
        return give(torch.nn.functional.gelu(gate) * up, out, input.dtype)
    if fault == "exp overflows":
        return give(gate * (gate.exp() / (1 + gate.exp())) * up, out, input.dtype)
    silu = gate / (1 + torch.exp(-gate))
    if fault == "rounds twice":
        silu = silu.to(input.dtype).float()
    return give(silu * up, out, input.dtype)


def gelu_and_mul(input: Tensor, out: Tensor | None = None, *, fault: str = "") -> Tensor:
    gate, up = input.float().chunk(2, dim=-1)
    if fault == "halves swapped":
        gate, up = up, gate
    if fault == "erf":
        return give(torch.nn.functional.gelu(gate) * up, out, input.dtype)
    if fault == "silu":
        return give(gate / (1 + torch.exp(-gate)) * up, out, input.dtype)
    if fault == "sigmoid of 1.702":
        return give(gate / (1 + torch.exp(-1.702 * gate)) * up, out, input.dtype)
    inner = math.sqrt(2 / math.pi) * gate * (1 + 0.044715 * gate * gate)
    if fault == "tails cancel":
        return give(0.5 * gate * (1 + torch.tanh(inner)) * up, out, input.dtype)
    gelu = gate / (1 + torch.exp(-2 * inner))
    if fault == "rounds twice":
        gelu = gelu.to(input.dtype).float()
    return give(gelu * up, out, input.dtype)


def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, fault: str) -> Tensor:
    if fault == "eps constant":
        eps = 1e-6
    mean = (x * x).mean(-1, keepdim=True)
    if fault == "eps outside":
        root = 1 / (mean.sqrt() + eps)
    elif fault == "eps ignored":
        root = mean.rsqrt()
    elif fault == "padded width":
        width = x.shape[-1]
        root = torch.rsqrt(mean * width / (1 << (width - 1).bit_length()) + eps)
    else:
        root = torch.rsqrt(mean + eps)
    normed = x * root
    if fault == "rounds twice":
        normed = normed.to(dtype).float()
    if fault == "weight plus one":
        return normed * (weight.float() + 1)
    return normed * weight.float()


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, *, fault: str = "") -> Tensor:
    return give(_norm(input.float(), weight, eps, input.dtype, fault), out, input.dtype)


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, fault: str = "") -> None:
    total = input.float() + residual.float()
    if fault != "residual kept":
        residual.copy_(total)
    if fault == "norm of the rounded sum":
        total = total.to(input.dtype).float()
    input.copy_(_norm(total, weight, eps, input.dtype, fault))


def rope(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    interleaved: bool = False,
    fault: str = "",
) -> None:
    rotary = cos_sin_cache.shape[-1]
    if fault == "pairing fixed":
        interleaved = False
    index = positions.long() + 1 if fault == "position off by one" else positions.long()
    cos, sin = cos_sin_cache[index.clamp_max(cos_sin_cache.shape[0] - 1)][:, None, :].chunk(2, dim=-1)
    if fault == "angle negated":
        sin = -sin
    for tensor in (query,) if fault == "key forgotten" else (query, key):
        part = tensor[..., :rotary].float()
        a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
        first, second = a * cos - b * sin, b * cos + a * sin
        turned = torch.stack((first, second), dim=-1).flatten(-2) if interleaved else torch.cat((first, second), -1)
        tensor[..., :rotary] = turned.to(tensor.dtype)
        if fault == "rest scaled":
            tensor[..., rotary:] *= 1.01


def dequantise(data: Tensor, scheme: str, fault: str = "") -> Tensor:
    """(rows, bytes) uint8 -> (rows, weights) fp32."""
    if scheme == FP8:
        return _dequantise_fp8(data, fault)
    if scheme not in BLOCK_BYTES:
        return plain_formats.dequantise(data, scheme, fault)
    size = BLOCK_BYTES[scheme]
    blocks = data.reshape(-1, size)
    d = blocks[:, :2].contiguous().view(torch.float16).float()
    if scheme == "q8_0":
        values = blocks[:, 2:].contiguous().view(torch.int8).float() * d
        return values.reshape(data.shape[0], data.shape[1] // size * BLOCK)
    codes = blocks[:, size - 16 :]
    low, high = codes & 15, codes >> 4
    if fault == "nibbles interleaved":
        quant = torch.stack((low, high), dim=-1).flatten(1).float()
    else:
        quant = torch.cat((low, high), dim=1).float()
    if scheme == "q4_0":
        values = (quant - (7.0 if fault == "zero point" else 8.0)) * d
    else:
        offset = blocks[:, 2:4].contiguous().view(torch.float16).float()
        values = quant * d + (0.0 if fault == "offset ignored" else offset)
    return values.reshape(data.shape[0], data.shape[1] // size * BLOCK)


def _dequantise_fp8(data: Tensor, fault: str) -> Tensor:
    columns = row_elements(data.shape[1], FP8)
    codes = data[:, :columns].clone(memory_format=torch.contiguous_format)
    if fault == "subnormals flushed":
        codes = torch.where((codes & 120) == 0, codes & 128, codes)
    values = codes.view(torch.float8_e5m2 if fault == "e5m2" else torch.float8_e4m3fn).float()
    raw = data[:, columns : columns + columns // 128 * 4].clone(memory_format=torch.contiguous_format)
    scales = raw.view(torch.float32)
    if fault == "first scale alone":
        scales = scales[:, :1].expand_as(scales)
    return values * scales.repeat_interleave(128, 1)


def embedding(
    input: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    *,
    dtype: Any = None,
    scheme: str = "unquantized",
    fault: str = "",
) -> Tensor:
    ids = input.long()
    if fault == "ids clamped":
        ids = ids.clamp(0, weight.shape[0] - 1)
    elif fault == "ids wrapped":
        ids = ids % weight.shape[0]
    elif ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= weight.shape[0]):
        raise IndexError(f"embedding: an id lies outside of [0, {weight.shape[0]})")
    rows = weight[ids.reshape(-1)]
    if scheme != "unquantized":
        rows = dequantise(rows, scheme, fault)
    if fault == "through fp16":
        rows = rows.half()
    target = dtype if dtype is not None else (weight.dtype if scheme == "unquantized" else torch.float32)
    return give(rows.reshape(*input.shape, rows.shape[-1]), out, target)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    scheme: str = "unquantized",
    fault: str = "",
) -> Tensor:
    x = input.float()
    w = weight.float() if scheme == "unquantized" else dequantise(weight, scheme, fault).to(input.dtype).float()
    if fault == "last column dropped":
        x, w = x[..., :-1], w[:, :-1]
    elif fault == "tf32":
        x, w = shorten(x, 13), shorten(w, 13)
    elif fault == "weight through bf16":
        w = w.bfloat16().float()
    elif fault == "weight through fp16":
        w = w.half().float()
    elif fault == "input through bf16":
        x = x.bfloat16().float()
    if fault in ("accumulates in fp16", "accumulates in bf16"):
        total = _narrow_sum(x, w, torch.float16 if fault.endswith("fp16") else torch.bfloat16)
    else:
        total = x @ w.T
    if bias is not None and fault != "bias ignored":
        total = total + bias.float()
    return give(total, out, input.dtype)


def _narrow_sum(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    total = torch.zeros(*x.shape[:-1], w.shape[0])
    for start in range(0, x.shape[-1], 8):
        total = (total + x[..., start : start + 8] @ w[:, start : start + 8].T).to(dtype).float()
    return total


def shorten(x: Tensor, bits: int) -> Tensor:
    """fp32 with the last `bits` of the significand rounded away; 13 makes TF32."""
    raw = x.contiguous().view(torch.int32)
    rounded = ((raw + (1 << (bits - 1))) & ~((1 << bits) - 1)).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)


def _held(values: Tensor, cache: Tensor, fault: str) -> Tensor:
    """`values` as `cache` may hold them."""
    if cache.dtype != torch.float8_e4m3fn:
        return values
    wide = values.float()
    if fault == "fp8 truncates":
        bits = wide.clamp(-448, 448).view(torch.int32)
        wide = (bits & ~0xFFFFF).view(torch.float32)
    if fault == "fp8 overflows":
        wide = torch.where(wide.abs() > 448, math.nan, wide)
    return wide.clamp(-448, 448).to(cache.dtype)


def kvcache_write(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, fault: str = ""
) -> None:
    page = 16 if fault == "page size fixed" else k_cache.shape[1]
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot < 0 and fault != "padding written":
            continue
        if slot == 0 and fault == "slot 0 skipped":
            continue
        at = (max(slot, 0) // page, max(slot, 0) % page)
        if at[0] >= k_cache.shape[0] or at[1] >= k_cache.shape[1]:
            continue
        k_cache[at] = _held(value[i] if fault == "keys and values swapped" else key[i], k_cache, fault)
        v_cache[at] = _held(value[i], v_cache, fault)


def rope_kvcache_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    fault: str = "",
) -> None:
    before = key.clone()
    rope(query, key, positions, cos_sin_cache, interleaved=interleaved, fault=fault)
    kvcache_write(
        before if fault == "key cached unrotated" else key, value, k_cache, v_cache, slot_mapping, fault=fault
    )
    if fault == "key rotated in the cache alone":
        key.copy_(before)
    if fault == "padding not rotated":
        key[slot_mapping < 0] = before[slot_mapping < 0]


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    out: Tensor | None = None,
    *,
    fault: str = "",
) -> Tensor:
    parameters = torch.stack([t.double() for t in (temperature, top_k, top_p, min_p, uniform)], dim=1)
    ids = [_choose(row, values, fault) for row, values in zip(logits.float(), parameters.tolist(), strict=True)]
    return give(torch.tensor(ids, dtype=torch.int64), out, torch.int64)


def _choose(z: Tensor, parameters: list[float], fault: str) -> int:
    temperature, top_k, top_p, min_p, draw = parameters
    bad = bool((torch.isnan(z) | (z == math.inf)).any()) or bool((z == -math.inf).all())
    if bad and fault != "unusable rows answered":
        return -1
    if temperature == 0.0:
        best = torch.nonzero(z == z.max()).flatten()
        if best.numel() == 0:
            return 0
        return int(best[-1] if fault == "last maximum" else best[0])
    probs = torch.softmax(torch.nan_to_num(z) / (1.0 if fault == "temperature ignored" else temperature), dim=-1)
    keep = probs > 0
    if 0 < top_k < z.numel() and fault != "top_k ignored":
        keep &= z >= torch.topk(z, int(top_k)).values[-1]
        if fault == "top_k ties dropped":
            keep = torch.zeros_like(keep)
            keep[torch.topk(z, int(top_k)).indices] = True
    if top_p < 1.0 and fault != "top_p ignored":
        kept = torch.where(keep, probs, torch.zeros_like(probs)).double()
        total = 1.0 if fault == "top_p of everything" else float(kept.sum())
        values, place, counts = torch.unique(kept, return_inverse=True, return_counts=True)
        mass = values * counts
        more = (mass.flip(0).cumsum(0).flip(0) - mass)[place]  # mass of the strictly more probable tokens
        if fault == "top_p stops short":
            keep &= (more + kept <= top_p * total) | (more == 0)
        else:
            keep &= (more < top_p * total) | (more == 0)
    if min_p > 0.0 and fault != "min_p ignored":
        keep &= probs >= min_p * probs.max()
    cumulative = torch.where(keep, probs, torch.zeros_like(probs)).double().cumsum(0)
    total = 1.0 if fault == "mass not renormalised" else float(cumulative[-1])
    above = torch.nonzero(cumulative > draw * total).flatten()
    if above.numel() == 0:
        return len(z) - 1
    chosen = int(above[0])
    return min(chosen + 1, len(z) - 1) if fault == "one too far" else chosen
