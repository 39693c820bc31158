"""The table of ops and rows: validates whatever is registered, all or nothing, and counts an epoch per change.

This is the only module-level state of the package that registration changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .errors import RegistrationError, UnknownOpError, UnknownRowError
from .forking import Lock
from .spec import KernelSpec, OpSpec

_lock: Final = Lock()
_ops: Final[dict[str, OpSpec]] = {}
_rows: Final[dict[str, dict[str, KernelSpec]]] = {}
_listeners: Final[list[Callable[[set[str]], None]]] = []
_shipped: Final[set[str]] = set()
_epoch = 0


def register(*specs: OpSpec | KernelSpec) -> None:
    """Add ops and rows in one step: either all of them are in afterwards, or none and a `RegistrationError` is raised.

    An op comes with its `native` row (one per scheme) in the same call. A row may be registered at any time, before or
    after the first dispatch of its op. Rows outside this package have their target located and its signature compared
    with the op's schema, without importing it.
    """
    global _epoch
    with _lock:
        ops, rows = dict(_ops), {op: dict(table) for op, table in _rows.items()}
        touched = {_add(spec, ops, rows) for spec in sorted(specs, key=lambda s: isinstance(s, KernelSpec))}
        for op_id in touched:
            _check_floor(ops[op_id], rows[op_id])
        _ops.update(ops)
        _rows.update(rows)
        _epoch += 1
    for listener in _listeners:
        listener(touched)


def unregister(*names: str) -> None:
    """Remove rows by name, or whole ops by id. For tests and notebooks; an op's native row goes only with its op."""
    global _epoch
    touched: set[str] = set()
    with _lock:
        for name in names:
            if name in _ops:
                del _ops[name], _rows[name]
                touched.add(name)
                continue
            spec = get_row(name)
            if spec.is_native:
                raise RegistrationError(name, "backend", "the floor cannot be removed; unregister its op")
            del _rows[spec.op][name]
            touched.add(spec.op)
        _epoch += 1
    for listener in _listeners:
        listener(touched)


def seal() -> None:
    """Take every row registered so far as this package's own; called once, before any other package can register."""
    if not _shipped:
        _shipped.update(name for table in _rows.values() for name in table)


def is_shipped(name: str) -> bool:
    """Whether a row is this package's own, whatever its target string says."""
    return name in _shipped


def epoch() -> int:
    """A number that grows with every registration."""
    return _epoch


def on_change(listener: Callable[[set[str]], None]) -> None:
    """Call `listener(op ids)` after every change of the table."""
    _listeners.append(listener)


def ops() -> tuple[OpSpec, ...]:
    """Every op, by id."""
    with _lock:
        return tuple(_ops[k] for k in sorted(_ops))


def get_op(op_id: str) -> OpSpec:
    """The op of this id; raises `UnknownOpError` with the nearest id."""
    try:
        return _ops[op_id]
    except KeyError:
        raise UnknownOpError(f"unknown op {op_id!r}{_nearest(op_id, list(_ops))}") from None


def rows(op_id: str) -> tuple[KernelSpec, ...]:
    """The rows of an op, by name."""
    get_op(op_id)
    with _lock:
        return tuple(_rows[op_id][k] for k in sorted(_rows[op_id]))


def get_row(name: str) -> KernelSpec:
    """The row of this name; raises `UnknownRowError` with the nearest name."""
    for table in _rows.values():
        if name in table:
            return table[name]
    names = [row for table in _rows.values() for row in table]
    raise UnknownRowError(f"unknown row {name!r}{_nearest(name, names)}")


def backends(op_id: str | None = None) -> tuple[str, ...]:
    """Backends that have rows, of one op or of all."""
    tables = [_rows[op_id]] if op_id is not None else list(_rows.values())
    return tuple(sorted({row.backend for table in tables for row in table.values()}))


def nearest_hint(name: str, known: list[str]) -> str:
    """`"; did you mean 'x'?"` or the list of what there is."""
    return _nearest(name, known)


def _add(spec: OpSpec | KernelSpec, ops: dict[str, OpSpec], rows: dict[str, dict[str, KernelSpec]]) -> str:
    if isinstance(spec, OpSpec):
        clash = [op.id for op in ops.values() if op.id == spec.id or op.function == spec.function]
        if clash:
            raise RegistrationError(spec.id, "id", f"op {clash[0]!r} is registered already")
        ops[spec.id] = spec
        rows[spec.id] = {}
        return spec.id
    if not isinstance(spec, KernelSpec):
        raise RegistrationError(repr(spec), "spec", "register takes OpSpec and KernelSpec objects")
    if spec.op not in ops:
        raise RegistrationError(spec.name, "op", f"unknown op {spec.op!r}{_nearest(spec.op, list(ops))}")
    table = rows[spec.op]
    if spec.name in table:
        raise RegistrationError(spec.name, "name", "a row of this name is registered already")
    spec.check_against(ops[spec.op])
    sham = [other.name for other in table.values() if other.target == spec.target and other.is_native != spec.is_native]
    if sham:
        raise RegistrationError(
            spec.name, "target", f"{spec.target} is also {sham[0]!r}: a row is not the floor renamed"
        )
    for other in table.values() if spec.is_native else ():
        shared = sorted(set(other.schemes) & set(spec.schemes))
        if other.is_native and (shared or not spec.schemes):
            what = f"scheme {shared[0]!r}" if shared else "the op"
            raise RegistrationError(
                spec.name, "backend", f"{what} has the floor {other.name!r} already; one is the rule"
            )
    if _shipped:  # rows of this package are compared by a test: import has no time for it
        from .signature import check_static  # pays for `ast` only where a foreign row comes in

        check_static(spec, ops[spec.op])
    table[spec.name] = spec
    return spec.op


def _check_floor(op: OpSpec, table: dict[str, KernelSpec]) -> None:
    floors = [row for row in table.values() if row.is_native]
    missing = set(op.schemes) - {scheme for row in floors for scheme in row.schemes}
    if missing or not floors:
        what = f"scheme {sorted(missing)[0]!r}" if missing else "the op"
        raise RegistrationError(op.id, "rows", f"{what} has no 'native' row; register the op together with its floor")


def _nearest(name: str, known: list[str]) -> str:
    import difflib  # only a wrong name pays for it

    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"
