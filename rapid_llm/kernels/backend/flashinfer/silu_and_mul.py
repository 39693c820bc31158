"""`flashinfer/silu_and_mul.*`: dense rows only, since flashinfer's kernel takes no strides."""

from __future__ import annotations

import torch

from rapid_llm.kernels.backend.flashinfer import LIBRARY
from rapid_llm.kernels.backend.flashinfer._calls import deliver, direct, first_use, on_device
from rapid_llm.kernels.ops.arguments import check_tensor, check_written
from rapid_llm.kernels.registry import ArgumentError

_silu_and_mul = LIBRARY.function("silu_and_mul")


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up of (..., 2d), in fp32. d is a multiple of 8: the launcher divides by it unasked."""
    half = input.shape[-1] // 2
    if half % 8 or input.shape[-1] % 2 or not input.is_contiguous():
        raise ArgumentError(
            "silu_and_mul: flashinfer needs a contiguous (..., 2d) with d a multiple of 8: "
            f"got {tuple(input.shape)}, strides {input.stride()}"
        )
    shape = (*input.shape[:-1], half)
    if out is not None:
        check_tensor("silu_and_mul", "out", out, input, shape)
        check_written("silu_and_mul", "out", out)
    result = direct(out, input)
    if result is None:
        result = torch.empty(shape, dtype=input.dtype, device=input.device)
    if input.numel():
        first_use("silu_and_mul")
        with on_device(input):
            _silu_and_mul(input, out=result)
    return deliver(result, out)
