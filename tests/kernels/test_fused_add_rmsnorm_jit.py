"""`jit/fused_add_rmsnorm`: every way through its launcher, against the oracle and its derived bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import jit, registry
from tests.kernels.devices import DTYPES
from tests.kernels.gpu_rows import check, need
from tests.kernels.test_rmsnorm_jit import HIDDEN, VIEWS, rows_for

pytestmark = pytest.mark.gpu

Fused = Callable[..., None]


@pytest.fixture(scope="module")
def fused() -> Fused:
    """The row, built first: a broken toolchain fails here, with its log, and not in the first test of values."""
    function = need(registry.get_row("jit/fused_add_rmsnorm"))
    jit.load_jit("fused_add_rmsnorm", "layernorm/fused_add_rmsnorm.cu")
    return function  # type: ignore[no-any-return]


def run(fused: Fused, input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """One call, compared with the oracle."""
    values = {"input": input.clone(), "residual": residual.clone(), "weight": weight, "eps": eps}
    assert fused(input, residual, weight, eps) is None
    check("fused_add_rmsnorm", values, [input, residual])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_values(fused: Fused, dtype: torch.dtype, hidden: int) -> None:
    """Catches: a dropped tail, the norm of the rounded sum, a vector count that a block does not hold."""
    weight = torch.randn(hidden, device="cuda").to(dtype)
    for rows in rows_for(hidden):
        x, residual = (torch.randn(rows, hidden, device="cuda").to(dtype) for _ in range(2))
        run(fused, x, residual, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weight_of_another_dtype(fused: Fused, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Catches: a weight read as if it had the input's dtype, or rounded to it."""
    for hidden in (33, 576, 4096, 20000):
        x, residual = (torch.randn(3, hidden, device="cuda").to(dtype) for _ in range(2))
        run(fused, x, residual, torch.rand(hidden, device="cuda").to(weight_dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", [v for v in VIEWS if "again" not in v])
def test_layouts(fused: Fused, dtype: torch.dtype, view: str) -> None:
    """Catches: one tensor's strides taken for the other's, a gap written."""
    for first, second in ((VIEWS[view], None), (None, VIEWS[view]), (VIEWS[view], VIEWS[view])):
        buffers = [torch.randn(40000, device="cuda").to(dtype) for _ in range(2)]
        before = [b.clone() for b in buffers]
        shape = VIEWS[view](buffers[0]).shape
        x, residual = (
            buffer[: shape.numel()].view(shape) if cut is None else cut(buffer)
            for buffer, cut in zip(buffers, (first, second), strict=True)
        )
        run(fused, x, residual, torch.randn(shape[-1], device="cuda").to(dtype))
        for buffer, old in zip(buffers, before, strict=True):
            assert int((buffer != old).sum()) <= shape.numel()


def test_special_values(fused: Fused) -> None:
    """Catches: a NaN of either tensor that is swallowed, or that reaches another row."""
    x, residual = torch.ones(4, 64, device="cuda"), torch.ones(4, 64, device="cuda")
    x[0, 5], residual[1, 63] = float("nan"), float("inf")
    run(fused, x, residual, torch.ones(64, device="cuda"))


def test_refusals(fused: Fused) -> None:
    """Catches: memory of another kind, size or stride that reaches a kernel, and tensors that share memory."""
    x, residual, weight = torch.ones(4, 6, device="cuda"), torch.ones(4, 6, device="cuda"), torch.ones(6, device="cuda")
    wide = torch.ones(4, 12, device="cuda")
    for wrong, text in (
        ((x.cpu(), residual, weight), "CUDA"),
        ((x, residual.cpu(), weight), "residual must be a CUDA tensor"),
        ((x, residual, weight.cpu()), "weight must be a CUDA tensor"),
        ((x, residual[:3], weight), "same shape"),
        ((x, residual.half(), weight), "dtype"),
        ((x, residual, weight[:5]), "same shape as a row"),
        ((x, x, weight), "overlaps"),
        ((wide[:, :6], wide[:, 3:9], weight), "overlaps"),
        ((x, residual, x[0]), "overlaps"),
        ((x[:1].expand(4, 6), residual, weight), "share memory"),
        ((torch.ones(6, 4, device="cuda").t(), residual, weight), "contiguous in its last dimension"),
    ):
        with pytest.raises(RuntimeError, match=rf"fused_add_rmsnorm.*{text}"):
            fused(*wrong)
    run(fused, wide[:, :6], wide[:, 6:], weight)


def test_more_than_2_31_elements(fused: Fused) -> None:
    """Catches: a 32-bit offset. Two tensors of 4.3 GB; rows on both sides of 2**31 elements are looked at."""
    rows = 2**31 // 4096 + 3
    x, residual = (torch.full((rows, 4096), 1.5, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    fused(x, residual, torch.full((4096,), 2.0, dtype=torch.bfloat16, device="cuda"), 0.0)
    for part in (slice(None, 4), slice(-4, None)):
        assert bool((x[part] == 2.0).all())
        assert bool((residual[part] == 3.0).all())
