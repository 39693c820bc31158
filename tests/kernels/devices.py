"""Where the tests of native rows run: the CPU, a GPU if there is one, and the CPU again in Triton's interpreter.

Tests marked `interpreter` run twice: as they are (PyTorch's path on the CPU) and with TRITON_INTERPRET=1 (Triton's).
"""

from __future__ import annotations

import pytest
import torch

from rapid_llm.kernels.ops.triton_support import INTERPRETED

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(
        torch.bfloat16,
        id="bf16",
        marks=pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter truncates where bf16 should be rounded"),
    ),
]
