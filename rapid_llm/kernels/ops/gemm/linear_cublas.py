"""`torch/linear`: the product of cuBLAS, as torch calls it, with sums that are kept in fp32 to their end.

By default torch lets cuBLAS add up the parts of a split product in bf16 or fp16, which loses digits on some shapes and
not on others. That is a setting of the process: `keep_full_sums` ends it, and where nobody has called that, it is taken
back around each call, under a lock, which costs some ten microseconds of host time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.arguments import check_disjoint, check_kind, check_tensor, check_written
from rapid_llm.kernels.ops.gemm.precision import exact_linear
from rapid_llm.kernels.registry import ArgumentError

_SETTINGS: Final = torch.backends.cuda.matmul
_LOOSE: Final = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_LOCK: Final = threading.Lock()


def available() -> bool | str:
    """Whether this torch has cuBLAS."""
    return True if torch.version.cuda is not None else "this torch is built without CUDA"


def keep_full_sums() -> None:
    """Have torch's CUDA products sum in fp32 from now on, in this process."""
    for name in _loose():
        setattr(_SETTINGS, name, False)


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """input @ weight.T + bias. See the op."""
    if weight.dim() != 2 or input.dim() == 0 or weight.shape[1] != input.shape[-1]:
        raise ArgumentError(
            f"linear: weight and input do not meet in the same shape: input {tuple(input.shape)}, weight "
            f"{tuple(weight.shape)}"
        )
    check_kind("linear", "weight", weight, input)
    shape = (*input.shape[:-1], weight.shape[0])
    if bias is not None:
        check_tensor("linear", "bias", bias, input, (weight.shape[0],))
    if out is not None:
        check_tensor("linear", "out", out, input, shape)
        check_written("linear", "out", out)
        for name, tensor in (("input", input), ("weight", weight), ("bias", bias)):
            if tensor is not None:
                check_disjoint("linear", "out", out, name, tensor)
    near, dense = _near(input), _near(weight)
    if _loose():
        with _full_sums():
            result = exact_linear(near, dense, bias)
    else:
        result = exact_linear(near, dense, bias)
    return result if out is None else out.copy_(result)


def _near(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one whose rows lie further apart than cuBLAS's 32-bit strides reach."""
    return tensor if all(stride < 2**31 for stride in tensor.stride()) else tensor.contiguous()


def _loose() -> list[str]:
    return [name for name in _LOOSE if getattr(_SETTINGS, name)]


@contextmanager
def _full_sums() -> Iterator[None]:
    with _LOCK:
        loose = _loose()
        for name in loose:
            setattr(_SETTINGS, name, False)
        try:
            yield
        finally:
            for name in loose:
                setattr(_SETTINGS, name, True)
