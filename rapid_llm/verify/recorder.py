"""Real activations: the calls that an engine makes, kept with their arguments, and made again by every row.

They are too large to ship, so they are recorded on demand from whatever runs within `recording()`. Of each op the first
calls of each dtype, scheme and row are kept. Calls whose weight is packed into a row's own form are left out: no oracle
reads it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Final

from torch import Tensor

from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import trace
from rapid_llm.kernels.registry.dispatcher import Decision
from rapid_llm.kernels.registry.facts import bind
from rapid_llm.verify.conformance import unavailable
from rapid_llm.verify.replay import Saved, replay
from rapid_llm.verify.report import Report

EACH: Final = 4
"""Calls that are kept of an op, row, dtype and scheme."""

MOST: Final = 1 << 24
"""Elements of a tensor above which a call is not kept."""


@dataclass(slots=True)
class Recorder:
    """The calls so far. full: whether another call of the same kind is of no interest."""

    calls: list[Saved]
    _seen: Counter[tuple[object, ...]]

    def keep(self, decision: Decision, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        facts, row = decision.facts, decision.row
        kind = (facts.op, row.name, facts.dtype, facts.scheme)
        if self._seen[kind] >= EACH or row.prepack is not None or facts.dtype is None:
            return
        values, _ = bind(registry.get_op(facts.op), args, keywords)
        if any(isinstance(v, Tensor) and v.numel() > MOST for v in values.values()):
            return
        self._seen[kind] += 1
        held = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in values.items()}
        device = facts.device if facts.index is None else f"{facts.device}:{facts.index}"
        name = f"recorded {len(self.calls)}"
        self.calls.append(Saved(row.name, device, facts.dtype, facts.scheme, name, "", held))


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Keep the calls of every handle that is bound within; bind the engine inside, too."""
    kept = Recorder([], Counter())
    plain = trace.counted

    def counted(function: Callable[..., Any], decision: Decision) -> Callable[..., Any]:
        inner = plain(function, decision)

        @wraps(inner)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            kept.keep(decision, args, keywords)
            return inner(*args, **keywords)

        return wrapper

    trace.counted = counted
    try:
        yield kept
    finally:
        trace.counted = plain


def by_every_row(calls: list[Saved]) -> Iterator[Report]:
    """Each call made by each row of its op that can run on its device and takes its dtype and scheme."""
    for call in calls:
        op = registry.get_row(call.row).op
        for row in registry.rows(op):
            takes = not row.dtypes or call.dtype in row.dtypes
            if takes and (not row.schemes or call.scheme in row.schemes) and not unavailable(row, call.device):
                yield replay(replace(call, row=row.name))
