"""Compares a row's target with its op's schema: before import from the source text, after import from the object."""

from __future__ import annotations

import ast
import importlib.machinery
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from .errors import RegistrationError
from .probes import find_top
from .schema import REQUIRED
from .spec import KernelSpec, OpSpec

_Params = list[tuple[str, str, object]]
_UNREADABLE = object()


def check_static(spec: KernelSpec, op: OpSpec) -> None:
    """Raise `RegistrationError` if the target's module is missing, lacks the attribute, or has another signature.

    Nothing is imported. A target whose definition is not plain in the source (an extension module, an alias) is left to
    the check after import.
    """
    module_name, attr = spec.target.split(":")
    if module_name in sys.modules:
        target = getattr(sys.modules[module_name], attr, None)
        if target is None:
            raise RegistrationError(spec.name, "target", f"module {module_name!r} has no attribute {attr!r}")
        check_loaded(spec, op, target)
        return
    found = _find(module_name)
    if found is None:
        raise RegistrationError(spec.name, "target", f"no module {module_name!r} is on the import path")
    if found.origin is None or not found.origin.endswith(".py"):
        return
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"), found.origin)
    definition = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == attr), None)
    if definition is not None:
        if not definition.decorator_list:
            _compare(spec, op, _from_ast(definition), (found.origin, definition.lineno))
    elif not any(attr in _names(node) for node in tree.body):
        raise RegistrationError(spec.name, "target", f"{found.origin} defines no {attr!r}")


def check_loaded(spec: KernelSpec, op: OpSpec, target: Callable[..., object]) -> None:
    """Raise `RegistrationError` if the imported target is not callable or its signature differs from the schema."""
    if not callable(target):
        raise RegistrationError(spec.name, "target", f"{spec.target} is a {type(target).__name__}, not a function")
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # a C callable without a signature cannot be compared
        return
    kinds = {"POSITIONAL_OR_KEYWORD": "pos", "POSITIONAL_ONLY": "pos", "KEYWORD_ONLY": "kw"}
    params: _Params = []
    for p in signature.parameters.values():
        if p.kind.name not in kinds:
            params.append((f"*{p.name}", "var", REQUIRED))
        else:
            params.append((p.name, kinds[p.kind.name], REQUIRED if p.default is p.empty else p.default))
    code = getattr(inspect.unwrap(target), "__code__", None)
    _compare(spec, op, params, None if code is None else (code.co_filename, code.co_firstlineno))


def _compare(spec: KernelSpec, op: OpSpec, got: _Params, place: tuple[str, int] | None) -> None:
    want = op.parsed.parameters()
    same = [(n, k) for n, k, _ in got] == [(n, k) for n, k, _ in want] and all(
        g is _UNREADABLE or g is w or g == w for (_, _, g), (_, _, w) in zip(got, want, strict=True)
    )
    if not same:
        problem = f"signature {_show(got)} differs from {_show(want)}, which {op.id}'s schema demands"
        raise RegistrationError(spec.name, "target", problem, place)


def _show(params: _Params) -> str:
    parts, starred = [], False
    for name, kind, default in params:
        if kind == "kw" and not starred:
            parts.append("*")
            starred = True
        shown = "" if default is REQUIRED else "=…" if default is _UNREADABLE else f"={default!r}"
        parts.append(name + shown)
    return f"({', '.join(parts)})"


def _from_ast(node: ast.FunctionDef) -> _Params:
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(a.defaults)) + list(a.defaults)
    params: _Params = [(p.arg, "pos", _value(d)) for p, d in zip(positional, defaults, strict=True)]
    if a.vararg is not None:
        params.append((f"*{a.vararg.arg}", "var", REQUIRED))
    params += [(p.arg, "kw", _value(d)) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    if a.kwarg is not None:
        params.append((f"*{a.kwarg.arg}", "var", REQUIRED))
    return params


def _value(node: ast.expr | None) -> object:
    if node is None:
        return REQUIRED
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _UNREADABLE


def _names(node: ast.stmt) -> set[str]:
    """Names that a top-level statement may bind."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _find(module_name: str) -> importlib.machinery.ModuleSpec | None:
    """Locate a module without importing its parents."""
    paths: list[str] | None = None
    found = None
    full = ""
    for part in module_name.split("."):
        full = f"{full}.{part}" if full else part
        found = find_top(full) if paths is None else importlib.machinery.PathFinder.find_spec(full, paths)
        if found is None:
            return None
        paths = list(found.submodule_search_locations or [])
    return found
