"""Conventions of Python sources of kernels, read off the syntax tree: [J3], [J4], [A4] and [T3]."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .findings import Finding

RULES: Final = ("contiguous", "autotune", "grid", "int64-pid", "sm-version", "thin-wrapper")
_LONG: Final = ("numel", "tokens", "rows")
"""Names that grow with a request; an axis of them belongs on grid[0]."""

_WORK: Final = ("item", "cpu", "tolist", "clone", "contiguous", "copy_", "to", "synchronize", "zero_", "fill_")
"""Methods that a thin wrapper has no business to call."""


def check(path: Path, text: str) -> Iterator[Finding]:
    """Findings of any module of kernels."""
    tree = ast.parse(text, str(path))
    policy = path.name == "tile_policy.py"
    compiled = any(isinstance(n, ast.FunctionDef) and _is_triton(n) for n in tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name == "contiguous" and compiled:
                fix = "honour strides in the kernel, or require the layout in the row"
                yield Finding(path, node.lineno, "contiguous", ".contiguous() copies in a wrapper", fix)
            if name == "get_device_capability" and not policy:
                fix = "ask rapid_llm.kernels.ops.tile_policy.sm_version, which tests can set"
                yield Finding(path, node.lineno, "sm-version", "asks torch for the architecture", fix)
        if isinstance(node, ast.FunctionDef):
            yield from _kernel(path, node)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "grid" for t in node.targets):
            yield from _grid(path, node.value)


def _kernel(path: Path, function: ast.FunctionDef) -> Iterator[Finding]:
    """A function that Triton compiles."""
    if any(name.endswith("autotune") for name in _decorators(function)):
        fix = "take tiles from tile_policy.resolve_tiles: tuning at run time differs from process to process"
        yield Finding(path, function.lineno, "autotune", f"{function.name} is tuned at run time", fix)
    if not _is_triton(function):
        return
    for node in ast.walk(function):
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Mult)
            and any(map(_bare_pid, (node.left, node.right)))
        ):
            fix = "tl.program_id(0).to(tl.int64): the product passes 2^31 in a big table"
            yield Finding(path, node.lineno, "int64-pid", f"{ast.unparse(node)} is taken in int32", fix)


def _is_triton(function: ast.FunctionDef) -> bool:
    return any(name.endswith("triton.jit") for name in _decorators(function))


def _decorators(function: ast.FunctionDef) -> list[str]:
    return [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list]


def _bare_pid(node: ast.expr) -> bool:
    """`tl.program_id(0)` as it is: grid[1] and grid[2] end at 65,535 and multiply small tiles."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("program_id") and node.args):
        return False
    return isinstance(node.args[0], ast.Constant) and node.args[0].value == 0


def _grid(path: Path, value: ast.expr) -> Iterator[Finding]:
    if not isinstance(value, ast.Tuple):
        return
    for axis, item in enumerate(value.elts[1:], 1):
        words = {n.id for n in ast.walk(item) if isinstance(n, ast.Name)}
        words |= {n.attr for n in ast.walk(item) if isinstance(n, ast.Attribute)}
        if words & set(_LONG):
            fix = f"put it on grid[0]: grid[{axis}] ends at 65,535"
            yield Finding(path, item.lineno, "grid", f"grid[{axis}] is {ast.unparse(item)}", fix)


def thin(path: Path, text: str, name: str) -> Iterator[Finding]:
    """The wrapper of a compiled row: allocate `out`, one call, return it."""
    tree = ast.parse(text, str(path))
    function = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name), None)
    if function is None:
        return
    last = function.end_lineno or function.lineno
    for node in ast.walk(function):
        if not isinstance(node, ast.stmt | ast.expr):
            continue
        problem = ""
        if isinstance(node, ast.For | ast.While | ast.With | ast.Try):
            problem = f"{type(node).__name__.lower()} statement"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _WORK:
            problem = f".{node.func.attr}()"
        if problem:
            yield Finding(path, node.lineno, "thin-wrapper", f"{name} does more than one call: {problem}", _THIN, last)
    calls = [n for n in function.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    if len(calls) > 1:
        yield Finding(path, calls[1].lineno, "thin-wrapper", f"{name} makes {len(calls)} calls", _THIN, last)
    calls_of = [ast.unparse(n.func) for n in ast.walk(function) if isinstance(n, ast.Call)]
    if "_floor" in calls_of:
        yield Finding(path, function.lineno, "thin-wrapper", f"{name} is still answered by the floor", _THIN, last)


_THIN: Final = "allocate out, call the launcher once, return out; checks belong in the launcher"
