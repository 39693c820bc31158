"""Example calls of every op: the real sizes at which its Triton kernels are compiled for GPUs that are not here.

`EXAMPLES[op id]` is a list of (label, make); `make(dtype)` gives (positional arguments, keyword arguments) on the CPU.
Give one example for each distinct compilation that users meet (a scheme, a layout, an aligned and a misaligned size),
not for each size: equal compilations are done once. Values do not matter, nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rapid_llm.kernels.ops.block_formats import DECODED, row_bytes
from rapid_llm.kernels.ops.gemm.gguf_blocks import DECODERS

Call = tuple[tuple[Any, ...], dict[str, Any]]
Make = Callable[[torch.dtype], Call]

_FP8 = torch.float8_e4m3fn
"""Of a cache."""

BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}


def _blocks(rows: int, elements: int, scheme: str) -> torch.Tensor:
    return torch.zeros(rows, elements // 32 * BLOCK_BYTES[scheme], dtype=torch.uint8)


def _pair(rows: int, hidden: int, dtype: torch.dtype, weight: torch.dtype) -> tuple[Any, ...]:
    return (
        torch.zeros(rows, hidden, dtype=dtype),
        torch.zeros(rows, hidden, dtype=dtype),
        torch.zeros(hidden, dtype=weight),
    )


def _rope(q_heads: int, kv_heads: int, dim: int, rotary: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Query and key as views of one fused projection, as the decoder passes them."""
    qkv = torch.zeros(5, (q_heads + 2 * kv_heads) * dim, dtype=dtype).view(5, q_heads + 2 * kv_heads, dim)
    query, key, _ = qkv.split((q_heads, kv_heads, kv_heads), 1)
    return query, key, torch.zeros(5, dtype=torch.int64), torch.zeros(99, rotary)


def _table(scheme: str) -> tuple[Any, ...]:
    return torch.zeros(3, dtype=torch.int64), _blocks(99, 576, scheme)


def _cache_write(heads: int, dim: int, dtype: torch.dtype, kv: torch.dtype | None = None) -> tuple[Any, ...]:
    key, value = torch.zeros(2, 5, heads, dim, dtype=dtype)
    k_cache, v_cache = torch.zeros(2, 4, 16, heads, dim, dtype=kv or dtype)
    return key, value, k_cache, v_cache, torch.zeros(5, dtype=torch.int64)


def _rope_cache_write(
    q_heads: int, kv_heads: int, dim: int, rotary: int, dtype: torch.dtype, kv: torch.dtype | None = None
) -> tuple[Any, ...]:
    """Query, key and value as views of one fused projection, as the decoder passes them."""
    qkv = torch.zeros(5, (q_heads + 2 * kv_heads) * dim, dtype=dtype).view(5, q_heads + 2 * kv_heads, dim)
    caches = torch.zeros(2, 4, 16, kv_heads, dim, dtype=kv or dtype)
    index = torch.zeros(5, dtype=torch.int64)
    return *qkv.split((q_heads, kv_heads, kv_heads), 1), *caches, index, torch.zeros(99, rotary), index


def _matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=dtype)


def _linear(rows: int, features: int, outputs: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return _matrix(rows, features, dtype), _matrix(outputs, features, dtype)


def _normed_linear(rows: int, features: int, outputs: int, dtype: torch.dtype, norm: torch.dtype) -> tuple[Any, ...]:
    x, weight = _linear(rows, features, outputs, dtype)
    return x, torch.zeros(features, dtype=norm), weight


def _linear_blocks(rows: int, features: int, outputs: int, scheme: str, dtype: torch.dtype) -> Call:
    return (_matrix(rows, features, dtype), _blocks(outputs, features, scheme)), {"scheme": scheme}


def _odd_blocks(rows: int, elements: int, scheme: str) -> torch.Tensor:
    """Blocks that start at an odd address, so that no two of their bytes can be loaded at once."""
    return _blocks(rows, elements + 32, scheme)[:, 1 : 1 + elements // 32 * BLOCK_BYTES[scheme]]


def _attention(
    tokens: int,
    sequences: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    *,
    ragged: bool,
    dtype: torch.dtype,
    kv: torch.dtype | None = None,
) -> tuple[Any, ...]:
    query = torch.zeros(tokens, q_heads, dim, dtype=dtype)
    k_cache, v_cache = torch.zeros(2, 4, 16, kv_heads, dim, dtype=kv or dtype)
    offsets = (torch.zeros(sequences + 1, dtype=torch.int32),) if ragged else ()
    lens, table = torch.zeros(sequences, dtype=torch.int32), torch.zeros(sequences, 3, dtype=torch.int32)
    return query, k_cache, v_cache, *offsets, lens, table, dim**-0.5


def _strided_experts(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Every other feature of the input, and weights whose last two dimensions are swapped in memory."""
    x, gate_up, down, weights, ids = args
    return x.repeat(1, 2)[:, ::2], gate_up.mT.contiguous().mT, down.mT.contiguous().mT, weights, ids


_LIMITS = {"window": 4096, "softcap": 50.0}


def _experts(tokens: int, hidden: int, inter: int, experts: int, topk: int, dtype: torch.dtype) -> tuple[Any, ...]:
    weights = torch.zeros(experts, 2 * inter, hidden, dtype=dtype), torch.zeros(experts, hidden, inter, dtype=dtype)
    chosen = torch.zeros(tokens, topk)
    return torch.zeros(tokens, hidden, dtype=dtype), *weights, chosen, chosen.int()


def _logits(rows: int, vocab: int, dtype: torch.dtype) -> tuple[Any, ...]:
    row = torch.zeros(rows)
    return torch.zeros(rows, vocab, dtype=dtype), row, row.int(), row, row, row


TORCH_FLOORS = ("attention.mla_decode", "comm.dispatch", "comm.combine")
"""Ops whose native row is PyTorch on every device: none of their calls launches a kernel of Triton."""

TORCH_DECODED = {"embedding": DECODED, "linear": tuple(s for s in DECODED if s in DECODERS and s != "q4_k")}
"""Op -> schemes without a kernel of Triton of their own: PyTorch dequantises, and what multiplies then is the kernel
for dense weights. Of `linear` one scheme stands for all."""


def by_triton(op_id: str, scheme: str | None) -> bool:
    """Whether an op's native row for a scheme has calls whose launches no other op or scheme has."""
    return op_id not in TORCH_FLOORS and scheme not in TORCH_DECODED.get(op_id, ())


def _scaled(rows: int, features: int, outputs: int, scheme: str, dtype: torch.dtype) -> Call:
    weight = torch.zeros(outputs, row_bytes(features, scheme), dtype=torch.uint8)
    return (_matrix(rows, features, dtype), weight), {"scheme": scheme}


def _fp8(rows: int, features: int, outputs: int, dtype: torch.dtype) -> Call:
    weight = torch.zeros(outputs, features + -(-features // 512) * 16, dtype=torch.uint8)
    return (_matrix(rows, features, dtype), weight), {"scheme": "fp8_block128"}


EXAMPLES: dict[str, list[tuple[str, Make]]] = {
    "scale": [
        ("aligned", lambda dtype: ((torch.zeros(4, 4096, dtype=dtype), 0.3), {})),
        ("tail", lambda dtype: ((torch.zeros(4097, dtype=dtype), 0.3), {})),
        ("strided", lambda dtype: ((torch.zeros(8, 6, 130, dtype=dtype)[:, ::2, 1:], 0.3), {})),
    ],
    "silu_and_mul": [
        ("small model", lambda dtype: ((torch.zeros(5, 3072, dtype=dtype),), {})),
        ("odd, strided", lambda dtype: ((torch.zeros(4, 3, 2 * 66, dtype=dtype)[:, ::2, ::2],), {})),
    ],
    "gelu_and_mul": [
        ("Gemma 2", lambda dtype: ((torch.zeros(5, 18432, dtype=dtype),), {})),
        ("odd, strided", lambda dtype: ((torch.zeros(4, 3, 2 * 66, dtype=dtype)[:, ::2, ::2],), {})),
    ],
    "rmsnorm": [
        ("small model", lambda dtype: ((torch.zeros(5, 576, dtype=dtype), torch.zeros(576), 1e-5), {})),
        ("8B", lambda dtype: ((torch.zeros(5, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)), {})),
        ("long row", lambda dtype: ((torch.zeros(2, 40000, dtype=dtype), torch.zeros(40000, dtype=dtype)), {})),
        ("strided", lambda dtype: ((torch.zeros(4, 3, 130, dtype=dtype)[:, ::2, ::2], torch.zeros(65)), {})),
    ],
    "fused_add_rmsnorm": [
        ("small model", lambda dtype: (_pair(5, 576, dtype=dtype, weight=torch.float32), {})),
        ("8B", lambda dtype: (_pair(5, 4096, dtype=dtype, weight=dtype), {})),
        ("long row", lambda dtype: (_pair(2, 40000, dtype=dtype, weight=dtype), {})),
    ],
    "rope": [
        ("small model", lambda dtype: (_rope(9, 3, 64, 64, dtype=dtype), {})),
        ("8B", lambda dtype: (_rope(32, 8, 128, 128, dtype=dtype), {})),
        ("partial, interleaved", lambda dtype: (_rope(6, 2, 80, 48, dtype=dtype), {"interleaved": True})),
    ],
    "embedding": [
        ("dense", lambda dtype: ((torch.zeros(3, dtype=torch.int64), torch.zeros(99, 576, dtype=dtype)), {})),
        ("cast", lambda dtype: ((torch.zeros(3, dtype=torch.int32), torch.zeros(99, 576)), {"dtype": dtype})),
        *(
            (scheme, lambda dtype, s=scheme: (_table(s), {"dtype": dtype, "scheme": s}))  # type: ignore[misc]
            for scheme in BLOCK_BYTES
        ),
    ],
    "kvcache.write": [
        ("small model", lambda dtype: (_cache_write(3, 64, dtype=dtype), {})),
        ("8B", lambda dtype: (_cache_write(8, 128, dtype=dtype), {})),
        ("fp8", lambda dtype: (_cache_write(8, 128, dtype=dtype, kv=_FP8), {})),
    ],
    "rope_kvcache_write": [
        ("small model", lambda dtype: (_rope_cache_write(9, 3, 64, 64, dtype=dtype), {})),
        ("8B", lambda dtype: (_rope_cache_write(32, 8, 128, 128, dtype=dtype), {})),
        ("fp8", lambda dtype: (_rope_cache_write(32, 8, 128, 128, dtype=dtype, kv=_FP8), {})),
        ("partial, interleaved", lambda dtype: (_rope_cache_write(6, 2, 80, 48, dtype=dtype), {"interleaved": True})),
    ],
    "attention.decode": [
        ("8B, one sequence", lambda dtype: (_attention(1, 1, 4, 1, 128, ragged=False, dtype=dtype), {})),
        ("small model, a batch", lambda dtype: (_attention(9, 9, 9, 3, 64, ragged=False, dtype=dtype), {})),
        ("Gemma 2", lambda dtype: (_attention(2, 2, 8, 4, 256, ragged=False, dtype=dtype), _LIMITS)),
        ("window", lambda dtype: (_attention(9, 9, 32, 8, 128, ragged=False, dtype=dtype), {"window": 4096})),
        ("fp8", lambda dtype: (_attention(1, 1, 4, 1, 128, ragged=False, dtype=dtype, kv=_FP8), {})),
    ],
    "attention.prefill": [
        ("8B", lambda dtype: (_attention(512, 1, 32, 8, 128, ragged=True, dtype=dtype), {})),
        ("small model, short chunks", lambda dtype: (_attention(6, 3, 9, 3, 64, ragged=True, dtype=dtype), {})),
        ("Gemma 2", lambda dtype: (_attention(512, 1, 8, 4, 256, ragged=True, dtype=dtype), _LIMITS)),
        ("window", lambda dtype: (_attention(512, 1, 32, 8, 128, ragged=True, dtype=dtype), {"window": 4096})),
        ("fp8", lambda dtype: (_attention(512, 1, 32, 8, 128, ragged=True, dtype=dtype, kv=_FP8), {})),
    ],
    "moe.topk": [
        ("Qwen3", lambda dtype: ((torch.zeros(5, 128, dtype=dtype), 8), {})),
        ("Mixtral, plain", lambda dtype: ((torch.zeros(5, 8, dtype=dtype), 2, False), {})),
    ],
    "fused_moe": [
        *(
            (f"Qwen3, {tokens} tokens", lambda dtype, t=tokens: (_experts(t, 2048, 768, 16, 8, dtype), {}))  # type: ignore[misc]
            for tokens in (1, 300)
        ),
        ("odd, strided", lambda dtype: (_strided_experts(_experts(40, 66, 34, 3, 2, dtype)), {})),
    ],
    "sample": [
        ("152k", lambda dtype: (_logits(2, 151936, dtype=dtype), {})),
        ("tiny, padded rows", lambda dtype: ((_logits(3, 99, dtype=dtype)[0][:, 1:], *_logits(3, 9, dtype)[1:]), {})),
    ],
    "linear_add": [
        *(
            (f"{rows} rows", lambda dtype, m=rows: ((*_linear(m, 576, 960, dtype), _matrix(m, 960, dtype)), {}))  # type: ignore[misc]
            for rows in (1, 9, 200, 2000)
        ),
        ("odd", lambda dtype: ((*_linear(3, 33, 65, dtype), _matrix(3, 65, dtype)), {})),
    ],
    "rmsnorm_linear": [
        ("small model", lambda dtype: (_normed_linear(1, 576, 960, dtype, torch.float32), {})),
        ("8B", lambda dtype: (_normed_linear(9, 4096, 6144, dtype, dtype), {})),
    ],
    "rmsnorm_linear_silu_and_mul": [
        ("small model", lambda dtype: (_normed_linear(1, 576, 3072, dtype, torch.float32), {})),
        ("8B", lambda dtype: (_normed_linear(9, 4096, 28672, dtype, dtype), {})),
    ],
    "linear": [
        *(
            (f"dense, {rows} rows", lambda dtype, m=rows: (_linear(m, 576, 960, dtype=dtype), {}))  # type: ignore[misc]
            for rows in (1, 9, 200, 2000)
        ),
        ("odd, bias", lambda dtype: ((*_linear(3, 33, 65, dtype=dtype), torch.zeros(65, dtype=dtype)), {})),
        ("strided", lambda dtype: ((_matrix(9, 66, dtype=dtype)[:, ::2], _matrix(33, 65, dtype=dtype).t()), {})),
        *(
            (f"{scheme}, {rows} rows", lambda dtype, m=rows, s=scheme: _linear_blocks(m, 576, 960, s, dtype=dtype))  # type: ignore[misc]
            for scheme, rows in (("q4_1", 1), ("q4_1", 1000), ("q8_0", 9), ("q4_0", 9))
        ),
        *(
            (f"fp8_block128, {rows} rows", lambda dtype, m=rows: _fp8(m, 512, 960, dtype=dtype))  # type: ignore[misc]
            for rows in (1, 9, 40, 2000)
        ),
        *(
            (f"{scheme}, {rows} rows", lambda dtype, m=rows, s=scheme: _scaled(m, 512, 960, s, dtype=dtype))  # type: ignore[misc]
            for scheme, each in (
                *(("int8_channel", (1, 2000)), ("fp8_channel", (9,)), ("int4_group128", (1, 9, 2000))),
                *(("int4_group64", (1,)), ("int4_group32", (9,))),
            )
            for rows in each
        ),
        ("q4_k", lambda dtype: ((_matrix(9, 512, dtype), torch.zeros(64, 288, dtype=torch.uint8)), {"scheme": "q4_k"})),
        (
            "fp8_block128, odd stride",
            lambda dtype: (
                (_matrix(2, 128, dtype), torch.zeros(33, 147, dtype=torch.uint8)[:, 1:145]),
                {"scheme": "fp8_block128"},
            ),
        ),
        (
            "odd address",
            lambda dtype: ((_matrix(2, 64, dtype=dtype), _odd_blocks(33, 64, "q4_1")), {"scheme": "q4_1"}),
        ),
    ],
}
