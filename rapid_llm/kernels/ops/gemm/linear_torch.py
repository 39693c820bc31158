"""CPU rows of `linear` for dense weights, from operators that torch ships: no compiler, no other library.

A row that keeps a form of the weight of its own says in its prepack function what it holds. `linear_rowwise` has the
rows that keep the weight quantised.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.arguments import check_tensor
from rapid_llm.kernels.ops.gemm.dequantise import pieces
from rapid_llm.kernels.ops.gemm.precision import exact_linear, rounds_fp32
from rapid_llm.kernels.registry import ArgumentError

_log = logging.getLogger(__name__)

DENSE: Final = "unquantized"
GROUPS: Final = 8
"""Batches into which `linear_gemv` cuts a weight at least, and the divisor of out_features that it asks for."""

FP16_MAX: Final = 65504.0


# -- what rows share --------------------------------------------------------------------------------------------------


def rows_of(input: Tensor, features: int, outputs: int, bias: Tensor | None) -> Tensor:
    """`input` as (rows, features); raises `ArgumentError` where it or the bias does not fit the packed weight."""
    if input.dim() == 0 or input.shape[-1] != features or input.dtype is not torch.float32:
        raise ArgumentError(
            f"linear: input must be float32 with {features} features, as the packed weight: got {tuple(input.shape)} "
            f"{input.dtype}"
        )
    if bias is not None:
        check_tensor("linear", "bias", bias, input, (outputs,))
    return input if input.dim() == 2 else input.reshape(-1, features)


def check_weight(weight: Tensor, input: Tensor, dtype: torch.dtype, dims: int) -> None:
    """Raise unless the weight has this dtype and number of dimensions and lies beside `input`: the batched product and
    FBGEMM's operators answer for a weight on another device, or of no memory at all, with whatever is in theirs."""
    if weight.dtype is not dtype or weight.dim() != dims or weight.device != input.device:
        raise ArgumentError(
            f"linear: this row reads a weight of {dims} dimensions and {dtype} on the same device, {input.device}: got "
            f"{tuple(weight.shape)} {weight.dtype} on {weight.device}"
        )


def deliver(product: Tensor, input: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """The row's answer: (rows, out_features), which is fresh, plus bias, in the shape of the result or into `out`."""
    if bias is not None:
        product.add_(bias)
    result = product if input.dim() == 2 else product.view(*input.shape[:-1], product.shape[1])
    if out is None:
        return result
    check_tensor("linear", "out", out, input, result.shape)
    return out.copy_(result)


# -- fp32, exact ------------------------------------------------------------------------------------------------------


def available_gemv() -> bool | str:
    """The batched product is worth its name only in MKL."""
    return True if torch.backends.mkl.is_available() else "torch is built without MKL"


def pack_dense(weight: Tensor, scheme: str) -> Tensor:
    """Holds the weight dense in fp32: 4 bytes a weight."""
    if scheme == DENSE:
        return weight
    return torch.cat([dense for _, dense in pieces(weight, scheme)] or [torch.empty(0, 0)])


def linear_gemv(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = DENSE
) -> Tensor:
    """fp32 for few rows of input, the weight cut into groups of outputs and multiplied as a batch.

    For one row torch's own product reads a weight at a quarter of the memory's speed, a batched one at all of it, but
    only if the input has strides (1, in_features), as a transpose has and a view of the same numbers has not.
    """
    check_weight(weight, input, torch.float32, 2)
    outputs, features = weight.shape
    rows = rows_of(input, features, outputs, bias)
    if rounds_fp32(input) or rows.shape[0] == 0 or features == 0 or outputs == 0:
        return deliver(exact_linear(rows, weight), input, bias, out)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    groups = _groups(outputs, torch.get_num_threads())
    columns = rows.t().unsqueeze(0).expand(groups, -1, -1)
    product = torch.bmm(weight.unflatten(0, (groups, -1)), columns)
    count = rows.shape[0]
    flat = product.view(1, outputs) if count == 1 else product.view(outputs, count).t().contiguous()
    return deliver(flat, input, bias, out)


@lru_cache(maxsize=256)
def _groups(outputs: int, threads: int) -> int:
    """The fewest groups of equal size that give every thread one."""
    return next((n for n in range(max(GROUPS, threads), outputs) if outputs % n == 0), outputs)


# -- fp16 weights -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class HalfWeight:
    """A weight in FBGEMM's fp16 tiles or, where fp16 cannot hold it, dense in fp32."""

    tiles: Any
    dense: Tensor | None
    outputs: int
    features: int

    @property
    def nbytes(self) -> int:
        return self.outputs * self.features * (2 if self.dense is None else 4)


def available_fp16() -> bool | str:
    """FBGEMM's fp16 product, which only x86 builds have, asked for a product that it must get right."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return "this torch has no FBGEMM for this CPU"
    packed = torch.ops.quantized.linear_prepack_fp16(torch.tensor([[0.5, -3.0]]), None)
    answer = float(torch.ops.quantized.linear_dynamic_fp16(torch.tensor([[4.0, 0.25]]), packed))
    return True if answer == 1.25 else f"FBGEMM's fp16 product gave {answer}, not 1.25"


def pack_fp16(weight: Tensor, scheme: str) -> HalfWeight:
    """Holds the weight in fp16: 2 bytes a weight. One with values beyond fp16's range stays fp32, and is logged."""
    dense = pack_dense(weight, scheme)
    outputs, features = dense.shape
    if dense.numel() == 0 or not float(dense.abs().max()) <= FP16_MAX:  # a NaN keeps fp32 as well
        if dense.numel():
            _log.warning("a linear weight of %d x %d has values beyond fp16: it stays fp32", outputs, features)
        return HalfWeight(None, dense, outputs, features)
    return HalfWeight(torch.ops.quantized.linear_prepack_fp16(dense, None), None, outputs, features)


def linear_fp16(
    input: Tensor, weight: HalfWeight, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = DENSE
) -> Tensor:
    """fp32 input and sums over a weight rounded to fp16."""
    rows = rows_of(input, weight.features, weight.outputs, bias)
    if weight.dense is not None:
        return deliver(exact_linear(rows, weight.dense), input, bias, out)
    if rows.shape[0] == 0:
        return deliver(rows.new_empty(0, weight.outputs), input, bias, out)
    return deliver(torch.ops.quantized.linear_dynamic_fp16(rows, weight.tiles), input, bias, out)
