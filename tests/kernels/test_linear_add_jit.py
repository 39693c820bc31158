"""`jit/linear_add.settled`, `jit/rmsnorm_linear.settled` and `jit/rmsnorm_linear_silu_and_mul.settled`: what the
conformance suite does not say. tests/kernels/test_emulated.py runs their device code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import dispatch, jit, registry
from rapid_llm.kernels.ops.gemm import (
    fused_linear_add_jit,
    fused_rmsnorm_linear_jit,
    fused_rmsnorm_linear_silu_and_mul_jit,
)
from rapid_llm.kernels.ops.gemm.linear_jit import settle
from tests.kernels.gpu_rows import check

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "linear_add": fused_linear_add_jit.linear_add,
    "rmsnorm_linear": fused_rmsnorm_linear_jit.rmsnorm_linear,
    "rmsnorm_linear_silu_and_mul": fused_rmsnorm_linear_silu_and_mul_jit.rmsnorm_linear_silu_and_mul,
}
SHAPES = ((3072, 2048), (2048, 2048), (2048, 8192), (6144, 4096), (4096, 4096), (4096, 14336), (8192, 2048), (33, 520))
"""Results and features: the layers of a 1B and an 8B model, and one with tails."""


@pytest.fixture(scope="module")
def built() -> None:
    """Builds once, so that a broken toolchain fails first and with its log; skips where the path is absent."""
    if not (probe := jit.why_not()).ok:
        pytest.skip(f"jit: {probe.text}")
    for op in FUNCTIONS:
        jit.load_jit(op, f"gemm/fused_{op}.cu")


def _arguments(op: str, outputs: int, features: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Normal numbers on the GPU, which nothing is writing any more."""
    g = torch.Generator().manual_seed(outputs)
    parts = 2 if op.endswith("mul") else 1
    made = {
        "input": torch.randn(1, features, generator=g),
        "weight": torch.randn(parts * outputs, features, generator=g) * features**-0.5,
    }
    if op == "linear_add":
        made["residual"] = torch.randn(1, outputs, generator=g)
    else:
        made["norm_weight"] = torch.rand(features, generator=g) + 0.5
    made = {name: value.to("cuda", dtype) for name, value in made.items()}
    return {**made, "weight": settle(made["weight"], "unquantized")}


def _run(op: str, values: dict[str, Tensor]) -> Tensor:
    """The result, or the residual."""
    result = FUNCTIONS[op](**values)
    return values["residual"] if result is None else result


# -- without a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", FUNCTIONS)
def test_refuses_cpu_tensors(op: str) -> None:
    """Catches: host memory handed to a kernel, or a compile started for it."""
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=rf"{op}.*CUDA"):
        FUNCTIONS[op](x, x, x)


@pytest.mark.parametrize("op", FUNCTIONS)
def test_takes_one_token_and_a_settled_weight(op: str) -> None:
    """Catches: a row offered for calls that its launcher refuses, or for a weight that may be in the making."""
    row = registry.get_row(f"jit/{op}.settled")
    assert "tokens <= 1" in [str(dim) for dim in row.shape.require]
    assert row.prepack == "rapid_llm.kernels.ops.gemm.linear_jit:settle"
    assert (row.dtypes, row.roundings) == (("bf16", "fp16"), ())


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("op", FUNCTIONS)
def test_layers_of_models(op: str, dtype: torch.dtype, built: None) -> None:
    """Catches: a plan for big weights that leaves outputs out or divides the features wrongly."""
    for outputs, features in SHAPES:
        values = _arguments(op, outputs, features, dtype)
        before = {name: value.clone() for name, value in values.items()}
        check(op, before, [_run(op, values)])


@pytest.mark.gpu
@pytest.mark.parametrize("op", FUNCTIONS)
def test_reads_what_the_kernel_before_it_wrote(op: str, built: None) -> None:
    """Catches: an input, a norm's weight or a residual read before the previous kernel has finished with it."""
    values = _arguments(op, 2048, 2048)
    source = {name: value.clone() for name, value in values.items() if name != "weight"}
    expected = _run(op, values).clone()
    for _ in range(20):
        for name, value in source.items():
            values[name].fill_(torch.nan)
            values[name].copy_(value)
        assert torch.equal(_run(op, values), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("op", FUNCTIONS)
def test_captured_and_replayed(op: str, built: None) -> None:
    """Catches: host work per call, a stream of its own, results that remember the captured values."""
    values = _arguments(op, 512, 512)
    _run(op, values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = _run(op, values)
    for seed in (3, 4):
        values["input"].copy_(torch.randn(1, 512, generator=torch.Generator().manual_seed(seed)))
        before = {name: value.clone() for name, value in values.items()}
        graph.replay()
        check(op, before, [result])


@pytest.mark.gpu
@pytest.mark.parametrize("op", FUNCTIONS)
def test_refusals(op: str, built: None) -> None:
    """Catches: shapes, dtypes, layouts or overlaps that would read or write stray memory."""
    values = _arguments(op, 8, 64)
    wrong: list[tuple[dict[str, Tensor], str]] = [
        ({"input": values["input"].float()}, "weight must have dtype"),
        ({"weight": values["weight"][:, :32]}, "do not meet in the same shape"),
        ({"weight": values["weight"].t().contiguous().t()}, "contiguous in its last dimension"),
        ({"weight": values["weight"].cpu()}, "CUDA"),
        ({"input": torch.cat([values["input"]] * 2)}, "same shape" if op == "linear_add" else "takes one row of input"),
    ]
    if op != "linear_add":
        wrong.append(({"norm_weight": values["norm_weight"].double()}, "norm_weight must have dtype"))
        wrong.append(({"norm_weight": values["norm_weight"][1:]}, "norm_weight must have the same shape"))
        wrong.append(({"input": values["input"][:, 1:], "weight": values["weight"][:, 1:]}, "norm_weight must have"))
    for change, said in wrong:
        with pytest.raises(RuntimeError, match=rf"{op}.*{said}"):
            _run(op, {**values, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("op", FUNCTIONS)
def test_bound_by_name(op: str, built: None) -> None:
    """Catches: a row that cannot be reached by name, or whose prepack is not run."""
    values = _arguments(op, 8, 64)
    before = {name: value.clone() for name, value in values.items()}
    handle = dispatch(op, **values, backend=f"jit/{op}.settled", prepack=True)
    result = handle(**{**values, "weight": handle.prepack(values["weight"])})
    check(op, before, [values["residual"] if result is None else result])
