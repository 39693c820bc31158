"""RapidLLM: LLM inference in which every operator is a declared, verified and measured choice.

from rapid_llm import LLM, SamplingParams

Importing this package imports no torch; what it offers is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.llm import LLM
    from .engine.params import SamplingParams
    from .engine.structured import StructuredOutput

__all__ = ["LLM", "SamplingParams", "StructuredOutput"]

_HOMES = {"LLM": ".engine.llm", "SamplingParams": ".engine.params", "StructuredOutput": ".engine.structured"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
