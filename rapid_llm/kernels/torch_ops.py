"""Every op as a torch op in the namespace `rapid_llm_ops`, with its fake kernel, generated from the `OpSpec`.

An op with a result gives `<op>(...) -> Tensor` and `<op>_out(..., *, Tensor(a!) out) -> ()`, one with several results
`<op>(...) -> (Tensor, ...)` alone. An in-place op gives `<op>_(...) -> ()` and a functional twin `<op>(...)` that
returns fresh copies of what the op writes. They exist for torch.compile, export and opcheck; eager calls go through
`rapid_llm.kernels.<op>`. Inference only: there is no autograd formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.library import Library, register_fake

from .registry import KernelError, codegen, registry
from .registry.forking import Lock
from .registry.schema import Arg
from .registry.spec import OpSpec

NAMESPACE: Final = "rapid_llm_ops"

_lock: Final = Lock()
_library: Final = Library(NAMESPACE, "FRAGMENT")
_defined: Final[set[str]] = set()


def overloads(op: OpSpec) -> dict[str, Any]:
    """The torch ops that the op's public function calls under torch.compile."""
    define_all()
    space = getattr(torch.ops, NAMESPACE)
    if op.parsed.mutated:
        return {"_torch_inplace": getattr(space, f"{op.function}_").default}
    if op.parsed.takes_out:
        return {
            "_torch_op": getattr(space, op.function).default,
            "_torch_out": getattr(space, f"{op.function}_out").default,
        }
    return {"_torch_op": getattr(space, op.function).default}


def define_all() -> None:
    """Define the torch ops of every registered op that has none yet."""
    with _lock:
        for op in registry.ops():
            if op.function not in _defined:
                _defined.add(op.function)
                _define(op)


def _define(op: OpSpec) -> None:
    if hasattr(getattr(torch.ops, NAMESPACE), op.function):
        raise KernelError(
            f"torch op {NAMESPACE}::{op.function} is defined already, by another copy of this package in the process; "
            "import one copy only"
        )
    if op.parsed.mutated:
        _define_inplace(op)
        return
    if op.outs:
        _define_several(op)
        return
    shape_of = codegen.result(op)

    def fake(*args: Any, **kwargs: Any) -> torch.Tensor:
        values = _bound(op, args, kwargs)
        shape, dtype = shape_of(**values)
        return _first(op, values).new_empty(shape, dtype=dtype)

    def functional(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = codegen.public_function(op.id)(*args, **kwargs)
        return result

    def with_out(*args: Any, out: torch.Tensor, **kwargs: Any) -> None:
        codegen.public_function(op.id)(*args, out=out, **kwargs)

    _add(op.function, op.schema, functional, fake)
    _add(f"{op.function}_out", _out_schema(op), with_out, lambda *args, **kwargs: None)


def _define_several(op: OpSpec) -> None:
    shapes_of = codegen.results(op)

    def fake(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        values = _bound(op, args, kwargs)
        return tuple(_first(op, values).new_empty(shape, dtype=dtype) for shape, dtype in shapes_of(**values))

    def functional(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = codegen.public_function(op.id)(*args, **kwargs)
        return found

    _add(op.function, op.schema, functional, fake)


def _define_inplace(op: OpSpec) -> None:
    mutated = op.parsed.mutated

    def in_place(*args: Any, **kwargs: Any) -> None:
        codegen.public_function(op.id)(*args, **kwargs)

    def copies(*args: Any, **kwargs: Any) -> Any:
        values = _bound(op, args, kwargs)
        fresh = {name: values[name].clone(memory_format=torch.contiguous_format) for name in mutated}
        codegen.public_function(op.id)(**{**values, **fresh})
        return _tuple([fresh[name] for name in mutated])

    def fake_copies(*args: Any, **kwargs: Any) -> Any:
        values = _bound(op, args, kwargs)
        return _tuple([values[name].new_empty(values[name].shape) for name in mutated])

    _add(f"{op.function}_", op.schema, in_place, lambda *args, **kwargs: None)
    returns = ", ".join("Tensor" for _ in mutated)
    text = f"({_arguments(op, alias=False)}) -> {f'({returns})' if len(mutated) > 1 else returns}"
    _add(op.function, text, copies, fake_copies)


def _add(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _library.define(f"{name}{schema}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _arguments(op: OpSpec, *, alias: bool, keyword: str = "") -> str:
    """The schema's argument list again, with or without alias marks, and with one more keyword-only argument."""
    parts = [_show(a, alias) for a in op.parsed.positional]
    named = [_show(a, alias) for a in op.parsed.keyword_only] + ([keyword] if keyword else [])
    return ", ".join([*parts, *(["*", *named] if named else [])])


def _show(arg: Arg, alias: bool) -> str:
    mark = f"({arg.name[0]}!)" if alias and arg.mutated else ""
    default = f"={_literal(arg.default)}" if arg.has_default else ""
    return f"{arg.type}{mark}{'?' if arg.optional else ''} {arg.name}{default}"


def _literal(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


def _out_schema(op: OpSpec) -> str:
    return f"({_arguments(op, alias=True, keyword='Tensor(a!) out')}) -> ()"


def _bound(op: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    values = dict(zip((a.name for a in op.parsed.args), args, strict=False))
    values.update(kwargs)
    for arg in op.parsed.args:
        values.setdefault(arg.name, arg.default)
    return values


def _first(op: OpSpec, values: dict[str, Any]) -> torch.Tensor:
    first: torch.Tensor = values[op.parsed.tensors[0].name]
    return first


def _tuple(items: list[torch.Tensor]) -> Any:
    return items[0] if len(items) == 1 else tuple(items)


def _follow(touched: set[str]) -> None:
    define_all()


registry.on_change(_follow)
