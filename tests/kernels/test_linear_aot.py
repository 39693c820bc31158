"""`aot/linear` and `aot/linear.settled`: the tests of the just-in-time rows, through the extension's wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapid_llm.kernels import registry
from tests.kernels.gpu_rows import need
from tests.kernels.test_linear_jit import (  # noqa: F401  (they take this module's fixture)
    test_another_device,
    test_captured_and_replayed,
    test_large_layers,
    test_reads_what_the_kernel_before_it_wrote,
    test_refusals,
    test_rows_do_not_depend_on_each_other,
    test_side_stream,
    test_strides,
    test_values,
)


@pytest.fixture(params=["aot/linear", "aot/linear.settled"])
def linear(request: pytest.FixtureRequest) -> Any:
    """The row's function; skips with the reason where it cannot run."""
    return need(registry.get_row(request.param))


@pytest.mark.gpu
def test_settled_reads_weights_just_written() -> None:
    """Catches: a prepack that leaves the weight in the making: the kernel reads it before the one before has ended."""
    row = registry.get_row("aot/linear.settled")
    function = need(row)
    assert row.prepack == registry.get_row("jit/linear.settled").prepack
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    source = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    from rapid_llm.kernels.ops.gemm.linear_jit import settle

    weight = settle(source * 2, "unquantized")
    assert torch.equal(function(x, weight), function(x, settle(source + source, "unquantized")))
