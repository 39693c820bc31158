"""Ops, and the dispatch that chooses a proven row for each.

`rapid_llm.kernels.rmsnorm(x, weight)` runs the best row for these arguments; `dispatch("rmsnorm", x, weight)` returns
it as a handle; `explain("rmsnorm", x, weight)` says why it was chosen. Importing this module imports neither torch nor
a kernel; the op functions themselves come into being on first access.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from . import ops as _ops  # noqa: F401 - importing it declares every op
from .registry import (
    UNMEASURED,
    Dim,
    Explanation,
    GoldenRecord,
    KernelSpec,
    Numerics,
    OpSpec,
    Out,
    Selected,
    Shape,
    dispatch,
    explain,
    profiler_ranges,
    register,
    use_backend,
)
from .registry import ops as _registered_ops
from .registry.registry import seal as _seal

_seal()

_EXPORTS: Mapping[str, str] = MappingProxyType({op.function: op.id for op in _registered_ops()})
"""Public function name -> op id, for every op of this package."""

_LAZY: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("PrepareReport", "compiles", "freeze", "frozen", "prepare", "thaw"), "preparation"),
        "FrozenError": "build",
    }
)
"""Name -> the module that is imported for it on first access."""

__all__ = [
    "UNMEASURED",
    "Dim",
    "Explanation",
    "GoldenRecord",
    "KernelSpec",
    "Numerics",
    "OpSpec",
    "Out",
    "Selected",
    "Shape",
    "dispatch",
    "explain",
    "profiler_ranges",
    "register",
    "use_backend",
    *sorted(_LAZY),
    *sorted(_EXPORTS),
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        return value
    op_id = _EXPORTS.get(name) or _op_called(name)
    if op_id is None and not name.startswith("_"):  # Python itself asks for names with underscores
        from .registry import plugins

        plugins.scan()
        op_id = _op_called(name)
    if op_id is None:
        here = sys.modules[__name__]  # given, Python adds the nearest name
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=here)
    from .registry.codegen import public_function

    function = public_function(op_id)
    if name in _EXPORTS:  # ops of other packages may be unregistered, so they are looked up each time
        globals()[name] = function
    return function


def _op_called(name: str) -> str | None:
    return next((op.id for op in _registered_ops() if op.function == name), None)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
