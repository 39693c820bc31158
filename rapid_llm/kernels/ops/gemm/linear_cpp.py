"""`cpp/linear.<scheme>`: GGUF blocks that stay as they are, decoded in C++; no copy of the weight is kept.

Why C++: see csrc/gemm/linear_blocks.cpp. `linear` decodes the weight in registers, once per four tokens, which wins
while there are few; `linear_gemm` and `linear_gemm_bf16` dequantise a bounded piece at a time into scratch memory that
stays in the cache and multiply it by torch's GEMM, which wins while there are many.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import load_cpp
from rapid_llm.kernels.ops.gemm._cpp_rows import decoded, multiplied
from rapid_llm.kernels.registry import ArgumentError

_SCHEMES: Final = ("q8_0", "q4_0", "q4_1")
_library: Final = load_cpp("linear_blocks", "gemm/linear_blocks.cpp")
_int16: Final = load_cpp("linear_blocks_int16", "gemm/linear_blocks_int16.cpp")
_NAMES: Final = {s: (f"linear_{s}", f"linear_int16_{s}", f"dequantise_{s}") for s in _SCHEMES}
"""The modules' functions: on fp32, on rounded input, and the one that writes dense rows."""


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """input (..., in_features) fp32 times blocks (out_features, bytes) uint8; see the op. Last dimensions are dense."""
    return decoded(getattr(_library, _names(scheme)[0]), input, weight, bias, out)


def linear_int16(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """The same with the input rounded to int16 per block of 32; an input with NaN or infinities is not rounded."""
    names = _names(scheme)
    return decoded(getattr(_library, names[0]), input, weight, bias, out, rounding=getattr(_int16, names[1]))


def linear_gemm(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """The same by fp32 GEMM over dequantised pieces of the weight."""
    return multiplied(getattr(_library, _names(scheme)[2]), input, weight, bias, out, torch.float32)


def linear_gemm_bf16(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """The same by bf16 GEMM: input, weight and result are rounded to bf16.

    A layer with a bias takes the fp32 GEMM: the bias must be added before the result is rounded.
    """
    dtype = torch.bfloat16 if bias is None else torch.float32
    return multiplied(getattr(_library, _names(scheme)[2]), input, weight, bias, out, dtype)


def _names(scheme: str) -> tuple[str, str, str]:
    try:
        return _NAMES[scheme]
    except KeyError:
        raise ArgumentError(f"linear: scheme must be one of {', '.join(_SCHEMES)}: got {scheme!r}") from None
