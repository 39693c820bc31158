"""`nvrtc/rmsnorm`: the kernels of csrc/layernorm/rmsnorm.cuh, compiled by NVRTC, for dense tensors."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.nvrtc import TYPES, VECTOR, Kernels
from rapid_llm.kernels.ops.arguments import check_alias, check_dense, check_disjoint, check_tensor
from rapid_llm.kernels.registry import ArgumentError

KINDS: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
"""A weight's dtype as the device's `AnyFloats` counts them."""

ROW: Final = "pppffillllll"
"""The signature of a kernel that takes a typed weight, and below of one that takes any."""

ANY_ROW: Final = "pptffillllll"

_FEW: Final = 264
"""Two blocks for each multiprocessor of today's GPUs."""

_LONGEST: Final = 0x7FFF0000


def _instances(dtype: str) -> dict[Hashable, tuple[str, str]]:
    """Variants are (whether the weight has the row's dtype, vectors in a thread), and the width of those for any."""
    own, width = TYPES[dtype], VECTOR[dtype]
    found: dict[Hashable, tuple[str, str]] = {
        (same, each): (f"rapid_llm::rmsnorm_kernel<{own}, {own if same else 'float'}, {width}, {each}>", ROW)
        for same in ((True,) if dtype == "fp32" else (True, False))
        for each in ((1, 2, 4) if same else (1, 2))
    }
    return found | {w: (f"rapid_llm::rmsnorm_any_kernel<{own}, {w}>", ANY_ROW) for w in (1, width)}


_kernels: Final = Kernels("rmsnorm", "layernorm/rmsnorm.cuh", _instances)
prepare: Final = _kernels.prepare


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    """rmsnorm of contiguous CUDA tensors; `out` may be `input`. See the op."""
    check_dense("rmsnorm", "input", input)
    launches = _kernels[input.get_device(), input.dtype]
    hidden = check_weight("rmsnorm", weight, input)
    if out is None:
        out = torch.empty_like(input)
    else:
        check_dense("rmsnorm", "out", out)
        check_tensor("rmsnorm", "out", out, input, input.shape)
        check_alias("rmsnorm", out, "input", input)
        check_disjoint("rmsnorm", "out", out, "weight", weight)
    count = input.numel()
    if count == 0:
        return out
    rows = count // hidden
    source, to, scale = input.data_ptr(), out.data_ptr(), weight.data_ptr()
    same = weight.dtype is input.dtype
    width = 16 // input.element_size()
    vectors = hidden % width == 0 and not (source | to | scale) & 15
    tail = (eps, 1.0 / hidden, hidden, rows, 1, hidden, 0, hidden, 0)
    if vectors and (same or weight.dtype is torch.float32):
        each, threads, together = row_block(width, row_class(rows), hidden // width, 4 if same else 2)
        if each:
            launches[same, each](-(-rows // together), threads, together, to, source, scale, *tail)
            return out
    width = width if vectors else 1
    _, threads, together = row_block(width, row_class(rows), -(-hidden // width), 4)
    launches[width](-(-rows // together), threads, together, to, source, scale, KINDS[weight.dtype], *tail)
    return out


def check_weight(op: str, weight: Tensor, input: Tensor) -> int:
    """The length of a row; raises unless `weight` is dense, on input's device, and has one float for each column."""
    check_dense(op, "weight", weight)
    if weight.device != input.device:
        raise ArgumentError(f"{op}: weight must be on the same CUDA device, {input.device}: got {weight.device}")
    row = input.shape[-1:]
    if weight.shape != row or not row:
        got = tuple(weight.shape)
        raise ArgumentError(f"{op}: weight must have the same shape as a row of input, {tuple(row)}: got {got}")
    if weight.dtype not in KINDS:
        raise ArgumentError(f"{op}: weight must have a floating dtype of at least 16 bits, got {weight.dtype}")
    hidden = row[0]
    if hidden > _LONGEST:
        raise ArgumentError(f"{op}: rows of {hidden} elements are too long for a kernel")
    return hidden


def row_class(rows: int) -> int:
    """The least number of rows that takes the same blocks as `rows` do."""
    return 1 if rows <= _FEW else _FEW + 1 if rows <= 4 * _FEW else 4 * _FEW + 1


@lru_cache(4096)
def row_block(width: int, rows: int, vectors: int, most: int) -> tuple[int, int, int]:
    """(vectors in a thread, threads for a row, rows in a block), as csrc/layernorm/norm_launch.h chooses; no vectors
    where no block can hold the row in registers."""
    each = 1
    while each < most and ((threads := _threads(vectors, each)) > 1024 or (rows > _FEW and threads > 32)):
        each *= 2
    threads = _threads(vectors, each)
    if threads > (512 if each * width > 16 else 1024):
        return 0, 1024, 1
    if threads > 32:
        return each, threads, 1
    return each, 32, 1 if rows <= _FEW else 4 if rows <= 4 * _FEW else 8


def _threads(vectors: int, each: int) -> int:
    """Whole warps that take `vectors`, `each` to a thread."""
    return (-(-vectors // each) + 31) // 32 * 32
