"""Every C++ row, compiled for each level of vector extensions that this CPU has, by the conformance suite.

test_conformance runs the highest level, which is what dispatch takes; here are those below it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

import rapid_llm.kernels.ops  # noqa: F401  (registers the rows)
from rapid_llm.kernels import cpp, registry
from rapid_llm.kernels.registry import KernelSpec
from rapid_llm.verify.conformance import check_row, unavailable, variants

pytestmark = pytest.mark.skipif(cpp.available() is not True, reason=f"C++ kernels: {cpp.available()}")
ROWS = [
    pytest.param(row, dtype, scheme, id=f"{row.name}-{dtype}")
    for op in registry.ops()
    for row in registry.rows(op.id)
    for dtype, scheme in variants(op, row)
    if row.backend == "cpp"
]
*LOWER, BEST = cpp.levels() or cpp.LEVELS[:1]


def modules_of(row: KernelSpec) -> dict[str, tuple[ModuleType, str, str]]:
    """The compiled modules that a row's wrapper holds: by name, the wrapper, and the module's name and source."""
    wrapper = importlib.import_module(row.target.partition(":")[0])
    known = {id(module): key for key, module in cpp._loaded.items()}
    return {
        name: (wrapper, *known[id(value)][:2])
        for name, value in vars(wrapper).items()
        if isinstance(value, ModuleType) and value.__name__.startswith("rapid_llm_cpp_")
    }


def differs(source: str, level: cpp.Level) -> bool:
    """Whether a source compiles to other code at the highest level: wider vectors, or an extension that it asks for."""
    more = set(BEST.isa) - set(level.isa)
    text = (cpp.SOURCES / source).read_text()
    return "avx512f" in more or any(f"__{i.replace('_', '').upper()}__" in text for i in more)


@pytest.mark.compiles
@pytest.mark.skipif(not LOWER, reason="this CPU has the lowest level alone")
@pytest.mark.parametrize("level", LOWER, ids=lambda level: level.name)
@pytest.mark.parametrize(("row", "dtype", "scheme"), ROWS)
def test_row_at_a_lower_level(
    row: KernelSpec, dtype: str, scheme: str | None, level: cpp.Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a variant that is wrong and that no test would meet on a machine of a higher level."""
    if reason := unavailable(row, "cpu"):
        pytest.skip(f"{row.name}: {reason}")
    found = modules_of(row)
    assert found, f"{row.target} holds no compiled module"
    if not any(differs(source, level) for _, _, source in found.values()):
        pytest.skip(f"{row.name} is the same code at {level.name} as at {BEST.name}")
    for name, (wrapper, module, source) in found.items():
        monkeypatch.setattr(wrapper, name, cpp.load_cpp(module, source, level))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        report = check_row(row.op, row.name, device="cpu", dtype=dtype, scheme=scheme, budget="full")
    finally:
        torch.set_num_threads(threads)
    assert report.ok, str(report)
