"""`aot/silu_and_mul`: the tests of the just-in-time row, through the extension's wrapper."""

from __future__ import annotations

from typing import Any

import pytest

from rapid_llm.kernels import registry
from tests.kernels.gpu_rows import need
from tests.kernels.test_silu_and_mul_jit import (  # noqa: F401  (they take this module's fixture)
    test_layouts,
    test_many_vectors,
    test_more_than_2_31_elements,
    test_refusals,
    test_special_values,
    test_values,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def silu_and_mul() -> Any:
    """The row's function, opened first; skips with the reason where it cannot run."""
    return need(registry.get_row("aot/silu_and_mul"))
