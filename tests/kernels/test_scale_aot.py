"""`aot/scale`: the tests of the just-in-time row, through the extension's wrapper."""

from __future__ import annotations

from typing import Any

import pytest

from rapid_llm.kernels import registry
from tests.kernels.gpu_rows import need
from tests.kernels.test_scale_jit import (  # noqa: F401  (they take this module's fixture)
    test_aliasing,
    test_many_vectors,
    test_misaligned,
    test_more_than_2_31_elements,
    test_refusals,
    test_values,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def scale() -> Any:
    """The row's function, opened first; skips with the reason where it cannot run."""
    return need(registry.get_row("aot/scale"))
