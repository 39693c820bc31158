"""`nvrtc/scale`: the kernels of csrc/elementwise/scale.cuh, compiled by NVRTC, for dense tensors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.nvrtc import TYPES, VECTOR, Kernels
from rapid_llm.kernels.ops.arguments import check_dense, check_tensor
from rapid_llm.kernels.registry import ArgumentError

THREADS: Final = 256


def _instances(dtype: str) -> dict[Hashable, tuple[str, str]]:
    """Variants are (elements in a vector, vectors in a thread)."""
    variants = [(width, unroll) for width in (VECTOR[dtype], 1) for unroll in (1, 4)]
    return {v: (f"rapid_llm::scale_kernel<{TYPES[dtype]}, {v[0]}, {v[1]}>", "ppfll") for v in variants}


_kernels: Final = Kernels("scale", "elementwise/scale.cuh", _instances)
prepare: Final = _kernels.prepare


def scale(input: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    """input * factor for contiguous CUDA tensors; `out` may be `input`. See the op."""
    check_dense("scale", "input", input)
    launches = _kernels[input.get_device(), input.dtype]
    size = input.element_size()
    count = input.numel()
    source = input.data_ptr()
    if out is None:
        out = torch.empty_like(input)
        to = out.data_ptr()
    else:
        check_dense("scale", "out", out)
        check_tensor("scale", "out", out, input, input.shape)
        to = out.data_ptr()
        if to != source and -count * size < to - source < count * size:
            raise ArgumentError("scale: out overlaps input in part; pass input itself or separate memory")
    if count == 0:
        return out
    width = 1 if (source | to) & 15 else 16 // size
    vectors = count // width
    # Small tensors want many blocks, big ones several loads in flight in each thread.
    unroll = 1 if vectors < 256 * 1024 else 4
    launches[width, unroll](vectors // (THREADS * unroll) + 1, THREADS, 1, to, source, factor, vectors, count)
    return out
