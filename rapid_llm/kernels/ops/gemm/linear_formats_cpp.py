"""`cpp/linear.<scheme>` for GGUF's younger blocks and rows of codes, as `linear_cpp` has it for older ones.

Source: csrc/gemm/linear_formats.cpp. A module of its own, so that a model of the common formats does not wait for
these to be compiled.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import load_cpp
from rapid_llm.kernels.ops.block_formats import DECODED
from rapid_llm.kernels.ops.gemm._cpp_rows import decoded, multiplied
from rapid_llm.kernels.registry import ArgumentError

_library: Final = load_cpp("linear_formats", "gemm/linear_formats.cpp")
_NAMES: Final = {scheme: (f"linear_{scheme}", f"dequantise_{scheme}") for scheme in DECODED}
"""The module's functions: the product, and the one that writes dense rows."""


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """input (..., in_features) fp32 times (out_features, bytes) uint8; see the op. Last dimensions are dense."""
    return decoded(getattr(_library, _names(scheme)[0]), input, weight, bias, out)


def linear_gemm(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """The same by fp32 GEMM over dequantised pieces of the weight."""
    return multiplied(getattr(_library, _names(scheme)[1]), input, weight, bias, out, torch.float32)


def _names(scheme: str) -> tuple[str, str]:
    try:
        return _NAMES[scheme]
    except KeyError:
        raise ArgumentError(f"linear: scheme must be one of {', '.join(DECODED)}: got {scheme!r}") from None
