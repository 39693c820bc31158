"""Builds what a row will run: flashinfer builds on a kernel's first call, so that a small one is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from rapid_llm.kernels.registry import KernelError, NotReadyError, probes, registry
from rapid_llm.kernels.registry.facts import Facts
from rapid_llm.kernels.registry.spec import DTYPES

_TYPES: Final = {label: getattr(torch, name) for name, label in DTYPES.items()}
_done: Final[set[tuple[object, ...]]] = set()


def prepare(facts: Facts) -> None:
    """Build and load the code that a call of `facts` runs, once for each dtype and size that has code of its own.

    Raises `NotReadyError` while a CUDA graph is captured or kernels are frozen, and whatever flashinfer's build raises.
    """
    if facts.dtype is None or facts.op not in _CALLS:
        raise KernelError(f"flashinfer cannot be prepared for {facts.op} in {facts.dtype}: state the op's dtype")
    names, make = _CALLS[facts.op]
    missing = [name for name in names if name not in facts.dims]
    if missing:
        raise KernelError(f"flashinfer builds {facts.op} for one {missing[0]}: state it in dims=")
    sizes = [facts.dims[name] for name in names]
    key = (facts.op, facts.device, facts.index, facts.dtype, *sizes)
    if key in _done:
        return
    if facts.capturing:
        raise NotReadyError(f"flashinfer builds {facts.op} on its first use, and a CUDA graph is being captured")
    device = torch.device(facts.device if facts.index is None else f"{facts.device}:{facts.index}")
    target = probes.load(registry.get_row(f"flashinfer/{facts.op}").target)
    with torch.inference_mode(False), torch.no_grad():
        for args in make(device, _TYPES[facts.dtype], *sizes):
            target(*args)
    _done.add(key)


Calls = list[tuple[Any, ...]]


def _rmsnorm(device: torch.device, dtype: torch.dtype, hidden: int) -> Calls:
    """Rows, and heads of a fused projection, which have kernels of their own."""
    rows = torch.zeros(2, hidden, dtype=dtype, device=device)
    heads = torch.zeros(2, 3, hidden, dtype=dtype, device=device)[:, :2]
    weight = torch.zeros(hidden, dtype=dtype, device=device)
    return [(rows, weight), (heads, weight)]


def _fused_add_rmsnorm(device: torch.device, dtype: torch.dtype, hidden: int) -> Calls:
    rows = [torch.zeros(2, hidden, dtype=dtype, device=device) for _ in range(2)]
    return [(*rows, torch.zeros(hidden, dtype=dtype, device=device))]


def _silu_and_mul(device: torch.device, dtype: torch.dtype) -> Calls:
    return [(torch.zeros(1, 16, dtype=dtype, device=device),)]


def _rope(device: torch.device, dtype: torch.dtype, rotary: int) -> Calls:
    heads = [torch.zeros(1, 1, rotary, dtype=dtype, device=device) for _ in range(2)]
    positions = torch.zeros(1, dtype=torch.int64, device=device)
    return [(*heads, positions, torch.zeros(2, rotary, device=device))]


def _sample(device: torch.device, dtype: torch.dtype) -> Calls:
    row = torch.ones(1, device=device)
    return [(torch.zeros(1, 4096, dtype=dtype, device=device), row, row.int(), row / 2, row, row / 2)]


def _attention(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page_size: int
) -> tuple[Any, ...]:
    query = torch.zeros(1, heads, head_dim, dtype=dtype, device=device)
    caches = [torch.zeros(1, page_size, kv_heads, head_dim, dtype=dtype, device=device) for _ in range(2)]
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    return query, *caches, lengths, torch.zeros(1, 1, dtype=torch.int32, device=device), head_dim**-0.5


def _decode(device: torch.device, dtype: torch.dtype, *sizes: int) -> Calls:
    return [_attention(device, dtype, *sizes)]


def _prefill(device: torch.device, dtype: torch.dtype, *sizes: int) -> Calls:
    query, k_cache, v_cache, lengths, table, scale = _attention(device, dtype, *sizes)
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=device)
    return [(query, k_cache, v_cache, offsets, lengths, table, scale)]


_SIZES: Final = ("query_heads", "kv_heads", "head_dim", "page_size")
_CALLS: Final[dict[str, tuple[tuple[str, ...], Callable[..., Calls]]]] = {
    "attention.decode": (_SIZES, _decode),
    "attention.prefill": (_SIZES, _prefill),
    "fused_add_rmsnorm": (("hidden",), _fused_add_rmsnorm),
    "rmsnorm": (("hidden",), _rmsnorm),
    "rope": (("rotary_dim",), _rope),
    "sample": ((), _sample),
    "silu_and_mul": ((), _silu_and_mul),
}
"""Op -> the dimensions that flashinfer has code of its own for, and small calls that build it."""
