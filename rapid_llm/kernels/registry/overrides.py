"""Forcing a backend: argument > context manager > `RAPID_LLM_<OP>_BACKEND` > `RAPID_LLM_FORCE_BACKEND`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from rapid_llm import settings

from . import registry
from .errors import UnknownRowError

active: Final = [0]
"""How many reasons there are for public functions to leave their fast path: contexts, tracing, ranges. A cell, so that
generated functions read it without a call."""

_stack: ContextVar[tuple[tuple[str, str | None], ...]] = ContextVar("rapid_llm_use_backend", default=())
_from_environment: Final[dict[str, str]] = {}
_ran: Final[set[str]] = set()


@dataclass(frozen=True, slots=True)
class Forced:
    """What is forced (a backend or a row name) and who says so."""

    what: str
    by: str


@contextmanager
def use_backend(backend: str, op: str | None = None) -> Iterator[None]:
    """Within the block, run `op` (every op, if None) through `backend`, a backend or a row name.

    Without `op`, ops that have no row of the backend are dispatched as usual. Raises `UnknownRowError` at once where no
    such row exists. Holds for this thread and the tasks started in it.
    """
    rows_of(backend, op)
    token = _stack.set((*_stack.get(), (backend, op)))
    active[0] += 1
    try:
        yield
    finally:
        active[0] -= 1
        _stack.reset(token)


def rows_of(what: str, op: str | None) -> tuple[str, ...]:
    """Names of the rows that `what` (backend or row name) means, of one op or all; raises `UnknownRowError` if none."""
    ops = [op] if op is not None else [o.id for o in registry.ops()]
    names = tuple(r.name for o in ops for r in registry.rows(o) if what in (r.backend, r.name))
    if not names:
        scope = f"op {op!r} has" if op is not None else "there is"
        known = [*registry.backends(op), *(r.name for o in ops for r in registry.rows(o))]
        raise UnknownRowError(f"{scope} no backend or row {what!r}{registry.nearest_hint(what, known)}")
    return names


def current(op_id: str, argument: str | None = None) -> Forced | None:
    """What is forced for this op now, or None."""
    if argument is not None:
        rows_of(argument, op_id)
        return Forced(argument, "the backend argument")
    for what, op in reversed(_stack.get()):
        if op == op_id or (op is None and _has(what, op_id)):
            return Forced(what, "use_backend")
    setting = settings.forced_backend(op_id)
    if setting is None:
        return None
    what, variable = setting
    _watch(what, variable)
    if variable == settings.op_variable(op_id):
        rows_of(what, op_id)
    else:
        rows_of(what, None)
        if not _has(what, op_id):
            return None
    return Forced(what, variable)


def in_context() -> bool:
    """Whether a `use_backend` block is open in this context."""
    return bool(_stack.get())


def chosen(row_name: str, backend: str) -> None:
    """Note that a row was selected, for the report of forced rows that never ran."""
    if _from_environment:
        _ran.update((row_name, backend))


def never_ran() -> tuple[tuple[str, str], ...]:
    """(variable, value) of every environment override seen by dispatch whose rows were never selected."""
    return tuple((variable, what) for variable, what in _from_environment.items() if what not in _ran)


def _has(what: str, op_id: str) -> bool:
    return any(what in (r.backend, r.name) for r in registry.rows(op_id))


def _watch(what: str, variable: str) -> None:
    if not _from_environment:
        import atexit

        atexit.register(_report)
    _from_environment[variable] = what


def _report() -> None:
    import sys

    for variable, what in never_ran():
        print(f"rapid_llm: {variable}={what} forced a backend that never ran", file=sys.stderr)
