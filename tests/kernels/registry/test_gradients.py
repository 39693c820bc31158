"""Ops are for inference: where autograd expects a gradient a call is refused, whichever row would answer it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rapid_llm import kernels
from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import ArgumentError, probes
from rapid_llm.verify.cases.build import Case

REFUSED = "no op has a gradient, and {} requires one.*detach"


def arguments(op: registry.OpSpec) -> dict[str, Any]:
    """Those of the op's second case, which is not empty."""
    scheme = op.schemes[0] if op.schemes else None
    dtype = "fp32" if "fp32" in op.dtypes else op.dtypes[0]
    cases: list[Case] = probes.load(op.cases)(dtype, "cpu", scheme, budget="interpret")
    return cases[1].make(torch.Generator().manual_seed(0))


def public(op: registry.OpSpec) -> Callable[..., Any]:
    return getattr(kernels, op.function)  # type: ignore[no-any-return]


def floats(op: registry.OpSpec, values: dict[str, Any]) -> list[str]:
    tensors = [a.name for a in op.parsed.tensors]
    return [n for n in tensors if isinstance(values.get(n), torch.Tensor) and values[n].dtype.is_floating_point]


@pytest.mark.parametrize("op", registry.ops(), ids=lambda op: op.id)
def test_every_argument_of_every_op_is_looked_at(op: registry.OpSpec) -> None:
    """Catches: a weight, a bias or a cache that requires a gradient and gets none, in silence."""
    values = arguments(op)
    names = floats(op, values)
    assert names
    for name in names:
        asking = {**values, name: values[name].detach().clone().requires_grad_()}
        with pytest.raises(ArgumentError, match=REFUSED.format(name)):
            public(op)(**asking)


X, W = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), torch.ones(64)
ROWS = [row.name for row in registry.rows("rmsnorm") if not row.devices or "cpu" in row.devices]


@pytest.mark.parametrize("row", ROWS)
def test_rows_agree(row: str) -> None:
    """Catches: a row of PyTorch that records what one of C++ does not; the same call refused where nothing records."""
    if not probes.check(registry.get_row(row).available).ok:
        pytest.skip(f"{row} cannot run here")
    x = X.clone().requires_grad_()
    with kernels.use_backend(row), pytest.raises(ArgumentError, match=REFUSED.format("input")):
        kernels.rmsnorm(x, W)
    with pytest.raises(ArgumentError, match=REFUSED.format("input")):
        kernels.dispatch("rmsnorm", x, W, backend=row)
    for nothing_recorded in (torch.no_grad, torch.inference_mode):
        with nothing_recorded(), kernels.use_backend(row):
            assert not kernels.rmsnorm(x, W).requires_grad
    with kernels.use_backend(row):
        assert not kernels.rmsnorm(x.detach(), W).requires_grad


def test_out_that_requires_a_gradient() -> None:
    """Catches: history of `out` that a call overwrites under autograd's feet."""
    with pytest.raises(ArgumentError, match=REFUSED.format("out")):
        kernels.rmsnorm(X, W, out=torch.empty(4, 64, requires_grad=True))


def test_the_torch_op_and_compiled_calls() -> None:
    """Catches: a backward that gives no gradient and says so in a warning at most."""
    x = X.clone().requires_grad_()
    with pytest.raises(ArgumentError, match=REFUSED.format("input")):
        torch.ops.rapid_llm_ops.rmsnorm(x, W)
    compiled = torch.compile(lambda t: kernels.rmsnorm(t, W), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=REFUSED.format("input")):
        compiled(x)
    with torch.no_grad():
        assert torch.equal(compiled(x), kernels.rmsnorm(x, W))
