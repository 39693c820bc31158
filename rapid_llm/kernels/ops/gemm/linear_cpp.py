"""`cpp/linear.<scheme>`: fp32 activations times GGUF blocks that stay as they are, decoded in registers.

Why C++: see csrc/gemm/linear_blocks.cpp. The row reads the raw blocks, so it keeps no copy of the weight; it decodes
the weight once per four tokens, which wins while there are few of them.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.cpp import load_cpp
from rapid_llm.kernels.ops.block_formats import row_bytes
from rapid_llm.kernels.registry import ArgumentError

_library: Final = load_cpp("linear_blocks", "gemm/linear_blocks.cpp")
_SIGNATURE: Final = (
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int),
)
_FUNCTIONS: Final = {scheme: getattr(_library, f"linear_{scheme}") for scheme in ("q8_0", "q4_0", "q4_1")}
for _function in _FUNCTIONS.values():
    _function.argtypes = _SIGNATURE
    _function.restype = None


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    """input (..., in_features) fp32 times blocks (out_features, bytes) uint8; see the op. Last dimensions are dense."""
    features = input.shape[-1]
    outputs, width = weight.shape
    if width != row_bytes(features, scheme) or input.dtype != torch.float32 or weight.dtype != torch.uint8:
        raise ArgumentError(
            f"linear: {scheme} weight {tuple(weight.shape)} {weight.dtype} does not fit input "
            f"{tuple(input.shape)} {input.dtype}"
        )
    if bias is not None and (bias.shape != (outputs,) or bias.dtype != torch.float32):
        raise ArgumentError(f"linear: bias must be ({outputs},) float32, got {tuple(bias.shape)} {bias.dtype}")
    dense_bias = None if bias is None else bias.contiguous()
    rows = input if input.dim() == 2 else input.reshape(-1, features)
    result = torch.empty((*input.shape[:-1], outputs), dtype=torch.float32) if out is None else out
    flat = result.view(-1, outputs) if result.is_contiguous() else torch.empty((rows.shape[0], outputs))
    _FUNCTIONS[scheme](
        *(weight.data_ptr(), weight.stride(0), rows.data_ptr(), rows.stride(0), rows.shape[0], features, outputs),
        *(None if dense_bias is None else dense_bias.data_ptr(), flat.data_ptr(), outputs, torch.get_num_threads()),
    )
    if flat.data_ptr() != result.data_ptr():
        result.copy_(flat.view(result.shape))
    return result
