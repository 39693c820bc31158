"""How much work a function does, in a number that no machine and no neighbour changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def python_calls(function: Callable[[], Any]) -> int:
    """Calls of functions written in Python, and resumptions of generators, while `function` runs."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
