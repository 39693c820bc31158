"""Values of benchmarks: normal numbers from a seeded generator, in the dtype of a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LABELS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def torch_dtype(label: str) -> Any:
    import torch

    return getattr(torch, LABELS[label])


def normal(g: Any, shape: Sequence[int], dtype: str, spread: float = 1.0) -> Any:
    import torch

    return (torch.randn(tuple(shape), generator=g) * spread).to(torch_dtype(dtype))
