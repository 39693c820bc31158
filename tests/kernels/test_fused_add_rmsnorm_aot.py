"""`aot/fused_add_rmsnorm`: the tests of the just-in-time row, through the extension's wrapper."""

from __future__ import annotations

from typing import Any

import pytest

from rapid_llm.kernels import registry
from tests.kernels.gpu_rows import need
from tests.kernels.test_fused_add_rmsnorm_jit import (  # noqa: F401  (they take this module's fixture)
    test_layouts,
    test_more_than_2_31_elements,
    test_refusals,
    test_special_values,
    test_values,
    test_weight_of_another_dtype,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def fused() -> Any:
    """The row's function, opened first; skips with the reason where it cannot run."""
    return need(registry.get_row("aot/fused_add_rmsnorm"))
