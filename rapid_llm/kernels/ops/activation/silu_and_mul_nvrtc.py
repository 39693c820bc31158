"""`nvrtc/silu_and_mul`: the kernel of csrc/activation/silu_and_mul.cuh, compiled by NVRTC, for dense tensors."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.nvrtc import TYPES, VECTOR, Kernels
from rapid_llm.kernels.ops.arguments import check_dense, check_disjoint, check_tensor
from rapid_llm.kernels.registry import ArgumentError

_MANY: Final = 132 * 2048
"""Vectors from which on each thread has two loads in flight."""


def _instances(dtype: str) -> dict[Hashable, tuple[str, str]]:
    """Variants are (elements in a vector, vectors in a thread)."""
    variants = [(1, 4), (VECTOR[dtype], 1), (VECTOR[dtype], 2)]
    return {v: (f"rapid_llm::silu_and_mul_kernel<{TYPES[dtype]}, {v[0]}, {v[1]}>", "pplulllll") for v in variants}


_kernels: Final = Kernels("silu_and_mul", "activation/silu_and_mul.cuh", _instances)
prepare: Final = _kernels.prepare


def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """silu_and_mul of contiguous CUDA tensors. See the op."""
    check_dense("silu_and_mul", "input", input)
    launches = _kernels[input.get_device(), input.dtype]
    shape = input.shape
    half, odd = divmod(shape[-1], 2)
    if odd:
        raise ArgumentError(f"silu_and_mul: the last dimension holds gate and up and must be even, got {shape[-1]}")
    if out is None:
        out = torch.empty((*shape[:-1], half), dtype=input.dtype, device=input.device)
    else:
        check_dense("silu_and_mul", "out", out)
        check_tensor("silu_and_mul", "out", out, input, (*shape[:-1], half))
        check_disjoint("silu_and_mul", "out", out, "input", input)
    count = input.numel()
    if count == 0:
        return out
    rows = count // (2 * half)
    source, to = input.data_ptr(), out.data_ptr()
    width = 16 // input.element_size()
    if half % width or (source | to) & 15:
        width, each = 1, 4
    else:
        each = 1 if rows * (half // width) < _MANY else 2
    chunks, threads = _block(half // width, each)
    launches[width, each](rows * chunks, threads, 1, to, source, half, chunks, 1, 2 * half, 0, half, 0)
    return out


@lru_cache(4096)
def _block(vectors: int, each: int) -> tuple[int, int]:
    """Blocks that share a row evenly, so that its last one is nearly full too, and the whole warps of each."""
    chunks = -(-vectors // (256 * each))
    warps = -(-vectors // (chunks * each * 32))
    return chunks, 32 * warps
