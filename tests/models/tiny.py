"""Tiny models of each family, written with the `gguf` package: known dense weights in, a GGUF file out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Ggml
from gguf.quants import dequantize, quantize

from rapid_llm.verify.formats import random_blocks

LAYERS = 2
UNQUANTISABLE = (Ggml.Q2_K, Ggml.Q3_K, Ggml.Q4_K, Ggml.Q5_K, Ggml.Q6_K, Ggml.IQ4_NL)
"""Types to which the `gguf` package does not quantise; it reads them."""


@dataclass(frozen=True)
class Shape:
    """Dimensions of a tiny model; every row length is a multiple of 32, so that any matrix can be quantised."""

    arch: str = "llama"
    hidden: int = 64
    wide: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 96
    context: int = 128
    theta: float = 10_000.0
    eps: float = 1e-5
    tied: bool = True
    rope_factors: tuple[float, ...] | None = None


@dataclass
class TinyModel:
    """A GGUF file and what it holds: dense fp32 weights by GGUF name, rows of q and k in original order."""

    path: Path
    shape: Shape
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def gguf_row_order(heads: int, head_dim: int) -> list[int]:
    """Row r of a llama file's attn_q is row order[r] of the original: pairs (i, i + d/2) side by side in each head."""
    half = head_dim // 2
    return [h * head_dim + side * half + i for h in range(heads) for i in range(half) for side in (0, 1)]


def dense_weights(shape: Shape, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by GGUF name, in original row order, scaled so that activations keep their size."""
    rng = np.random.default_rng(seed)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    def vector(size: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    out = {"token_embd.weight": matrix(shape.vocab, shape.hidden) * 4, "output_norm.weight": vector(shape.hidden)}
    if not shape.tied:
        out["output.weight"] = matrix(shape.vocab, shape.hidden)
    for i in range(LAYERS):
        at = f"blk.{i}."
        out[f"{at}attn_norm.weight"] = vector(shape.hidden)
        out[f"{at}ffn_norm.weight"] = vector(shape.hidden)
        for name, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            out[f"{at}{name}.weight"] = matrix(rows, shape.hidden)
            if shape.arch == "qwen2":
                out[f"{at}{name}.bias"] = vector(rows) - 1
        if shape.arch == "qwen3":
            out[f"{at}attn_q_norm.weight"] = vector(shape.head_dim)
            out[f"{at}attn_k_norm.weight"] = vector(shape.head_dim)
        out[f"{at}attn_output.weight"] = matrix(shape.hidden, q)
        out[f"{at}ffn_gate.weight"] = matrix(shape.wide, shape.hidden)
        out[f"{at}ffn_up.weight"] = matrix(shape.wide, shape.hidden)
        out[f"{at}ffn_down.weight"] = matrix(shape.hidden, shape.wide)
    if shape.rope_factors is not None:
        out["rope_freqs.weight"] = np.array(shape.rope_factors, np.float32)
    return out


def metadata(shape: Shape) -> dict[str, Any]:
    """The hyper-parameters of a file, by key."""
    a = shape.arch
    out: dict[str, Any] = {
        f"{a}.block_count": LAYERS,
        f"{a}.context_length": shape.context,
        f"{a}.embedding_length": shape.hidden,
        f"{a}.feed_forward_length": shape.wide,
        f"{a}.attention.head_count": shape.heads,
        f"{a}.attention.head_count_kv": shape.kv_heads,
        f"{a}.attention.layer_norm_rms_epsilon": shape.eps,
        f"{a}.rope.freq_base": shape.theta,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if shape.head_dim * shape.heads != shape.hidden:
        out[f"{a}.attention.key_length"] = out[f"{a}.attention.value_length"] = shape.head_dim
    return out


def write(
    path: Path,
    arch: str,
    entries: dict[str, Any],
    tensors: dict[str, np.ndarray],
    types: dict[str, Ggml] | None = None,
    alignment: int | None = None,
) -> None:
    """A GGUF file of `entries` and `tensors`; a tensor in `types` holds raw bytes of that type."""
    writer = gguf.GGUFWriter(path, arch)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in entries.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, data in tensors.items():
        writer.add_tensor(name, data, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(
    path: Path,
    shape: Shape | None = None,
    *,
    quant: Ggml = Ggml.F32,
    types: dict[str, Ggml] | None = None,
    seed: int = 0,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    entries: dict[str, Any] | None = None,
) -> TinyModel:
    """Write a tiny model. quant: type of every matrix; types: of single ones. drop, extra: tensors left out or added;
    entries: metadata added or replaced. The model's `weights` are what the file's (possibly quantised) rows mean."""
    shape = shape or Shape()
    model = TinyModel(path, shape)
    tensors: dict[str, np.ndarray] = {}
    raw: dict[str, Ggml] = {}
    for name, dense in dense_weights(shape, seed).items():
        kind = (types or {}).get(name, quant if dense.ndim == 2 else Ggml.F32)
        rows = _random_blocks(dense, kind) if kind in UNQUANTISABLE else quantize(dense, kind)
        model.weights[name] = torch.from_numpy(dequantize(rows, kind).astype(np.float32))
        if shape.arch == "llama" and (".attn_q." in name or ".attn_k." in name):
            rows = rows[gguf_row_order(shape.heads if ".attn_q." in name else shape.kv_heads, shape.head_dim)]
        if name not in drop:
            tensors[name] = rows
            raw[name] = kind
    for name, data in (extra or {}).items():
        tensors[name] = data
    write(path, shape.arch, {**metadata(shape), **(entries or {})}, tensors, raw)
    return model


def _random_blocks(like: np.ndarray, kind: Ggml) -> np.ndarray:
    """Random blocks of a type, with weights about as large as those of `like`."""
    generator = torch.Generator().manual_seed(like.size % 997)
    spread = 2 * float(like.std())
    return random_blocks(generator, *like.shape, kind.name.lower(), spread=spread).numpy()


def qwen2() -> Shape:
    """A family with biases and rows in original order."""
    return replace(Shape(), arch="qwen2", tied=False)


def qwen3() -> Shape:
    """A family with normalised heads, and heads that are not hidden / count wide."""
    return replace(Shape(), arch="qwen3", head_dim=32)
