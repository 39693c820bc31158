"""`cpp/linear.<scheme>` of the younger formats: what the conformance suite does not say."""

from __future__ import annotations

import pytest
import torch

from rapid_llm.kernels import cpp
from rapid_llm.kernels.ops.block_formats import DECODED, FORMATS, row_bytes
from rapid_llm.kernels.ops.gemm.dequantise import dequantise
from rapid_llm.kernels.registry import ArgumentError
from rapid_llm.verify.formats import random_blocks

pytestmark = pytest.mark.skipif(cpp.available() is not True, reason=f"C++ kernels: {cpp.available()}")


@pytest.mark.parametrize("scheme", DECODED)
def test_weights_are_those_of_the_floor_bit_for_bit(scheme: str) -> None:
    """Catches: a decoder that rounds twice, or otherwise than PyTorch's does; a piece from the wrong row on."""
    from rapid_llm.kernels.ops.gemm import linear_formats_cpp as rows

    weight = random_blocks(torch.Generator().manual_seed(8), 21, 512, scheme)
    dense = torch.empty(9, 512)
    getattr(rows._library, f"dequantise_{scheme}")(dense, weight, 12, 2)
    assert torch.equal(dense, dequantise(weight, scheme)[12:])


def test_nan_of_fp8_comes_through() -> None:
    """Catches: the code for NaN decoded as 480, as its bits alone would say."""
    from rapid_llm.kernels.ops.gemm.linear_formats_cpp import linear

    weight = torch.zeros(3, row_bytes(64, "fp8_channel"), dtype=torch.uint8)
    weight[:, 64:68] = torch.ones(3, 1).view(torch.uint8)
    weight[1, 5], weight[2, 63] = 127, 255
    got = linear(torch.ones(2, 64), weight, scheme="fp8_channel")
    assert got.isnan().tolist() == [[False, True, True]] * 2


def test_what_does_not_fit_is_refused() -> None:
    """Catches: rows of another width, or of another format, read beyond their end; a scheme of the other module."""
    from rapid_llm.kernels.ops.gemm.linear_formats_cpp import linear, linear_gemm

    for scheme in ("q4_k", "int8_channel", "int4_group64"):
        columns = 2 * max(FORMATS[scheme].weights, 32)
        weight = torch.zeros(4, row_bytes(columns, scheme), dtype=torch.uint8)
        for call in (linear, linear_gemm):
            with pytest.raises(RuntimeError, match="does not fit"):
                call(torch.zeros(2, 2 * columns), weight, scheme=scheme)
            with pytest.raises(RuntimeError, match="uint8"):
                call(torch.zeros(2, columns), weight.to(torch.int8), scheme=scheme)
    with pytest.raises(RuntimeError, match="does not fit 48 features"):
        linear(torch.zeros(2, 48), torch.zeros(4, 64, dtype=torch.uint8), scheme="int8_channel")
    with pytest.raises(ArgumentError, match=r"scheme must be one of q5_0, .*got 'q4_1'"):
        linear(torch.zeros(2, 64), torch.zeros(4, 40, dtype=torch.uint8), scheme="q4_1")
