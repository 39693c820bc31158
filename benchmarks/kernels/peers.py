"""Peers that several benchmarks share: functions of the op's own arguments, made only where their library is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def plain(fn: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """A peer that torch alone computes."""
    return lambda: fn


def compiled(fn: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """`fn` under torch.compile, for the shapes at hand; missing where there is no compiler that inductor can use."""

    def make() -> Callable[..., Any]:
        import torch

        takes = [name for name in inspect.signature(fn).parameters if name != "out"]
        lines = f"def call({', '.join(takes)}):\n    return fn({', '.join(takes)})\n"
        scope: dict[str, Any] = {"fn": fn}
        exec(lines, scope)
        return torch.compile(scope["call"], dynamic=False)

    return make
