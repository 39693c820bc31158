"""Values of benchmarks, drawn on the CPU from a seeded generator: numbers, rotary tables, and pages of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LABELS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

HEADS = {"smollm2-135m": (9, 3, 64), "llama3-8b": (32, 8, 128)}
"""Query heads, key heads and head size."""

PAGE = 16


def torch_dtype(label: str) -> Any:
    import torch

    return getattr(torch, LABELS[label])


def normal(g: Any, shape: Sequence[int], dtype: str, spread: float = 1.0) -> Any:
    import torch

    return (torch.randn(tuple(shape), generator=g) * spread).to(torch_dtype(dtype))


def uniform(g: Any, count: int, low: float, high: float) -> Any:
    import torch

    return torch.rand(count, generator=g) * (high - low) + low


def positions(g: Any, tokens: int, limit: int = 4096) -> Any:
    import torch

    return torch.randint(0, limit, (tokens,), generator=g)


def rotary_table(dim: int, limit: int = 4096, base: float = 10000.0) -> Any:
    """(limit, dim) fp32: cosines, then sines."""
    import torch

    angles = torch.arange(limit)[:, None] / base ** (torch.arange(0, dim, 2) / dim)
    return torch.cat([angles.cos(), angles.sin()], 1).float()


def pages(g: Any, sequences: int, length: int, page: int = PAGE) -> tuple[int, Any]:
    """(pages in all, block table): every sequence's pages scattered over the cache."""
    import torch

    each = -(-length // page)
    order = torch.randperm(sequences * each, generator=g)
    return sequences * each, order.view(sequences, each).to(torch.int32)


def lengths(sequences: int, length: int) -> Any:
    import torch

    return torch.full((sequences,), length, dtype=torch.int32)
