"""What a call may not bring along: tensors that are no arguments, caches of results, and inputs without content."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

from rapid_llm.kernels.registry import Selected

from .errors import DegenerateInputError, HiddenInputError, RememberedError
from .storages import is_tensor, tensors

SAMPLED: Final = 4096
FEWEST_VALUES: Final = 8
"""Distinct values among the sampled ones that a tensor of at least 64 elements has to have."""


def refuse_hidden(fn: Callable[..., object], name: str) -> None:
    """Raise `HiddenInputError` where `fn` holds a tensor: in a closure, a default, a partial, its object, or a global.

    Such a tensor is read by every call from the same memory, so that no rotation can make it cold. A handle that
    dispatch made may have module-level tensors: they are its row's workspace, and its inputs are known by its op.
    Raises `RememberedError` for a function behind a cache of results.
    """
    where = next(_held(fn, set(), not isinstance(fn, Selected)), None)
    if where is not None:
        raise HiddenInputError(f"{name}: {where} is a tensor; pass it as an argument, so that it is rotated")
    if hasattr(fn, "cache_info"):
        raise RememberedError(f"{name}: the function keeps its results (functools.cache); pass the function beneath")


def _held(fn: Any, seen: set[int], modules: bool) -> Iterator[str]:
    """Places of tensors that `fn` holds; functions in closures are followed. modules: look at globals too."""
    if id(fn) in seen:
        return
    seen.add(id(fn))
    if isinstance(fn, functools.partial):
        yield from _within(list(fn.args), "an argument of functools.partial", seen, modules)
        yield from _within(dict(fn.keywords), "a keyword of functools.partial", seen, modules)
        yield from _held(fn.func, seen, modules)
    elif isinstance(fn, types.MethodType):
        yield from _within(_state(fn.__self__), f"an attribute of its {type(fn.__self__).__name__}", seen, modules)
        yield from _held(fn.__func__, seen, modules)
    elif isinstance(fn, types.FunctionType):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            yield from _within(content, f"{name!r} in the closure", seen, modules)
        yield from _within(list(fn.__defaults__ or ()), "a default", seen, modules)
        yield from _within(dict(fn.__kwdefaults__ or {}), "a default", seen, modules)
        for name in _globals(fn.__code__) if modules else ():
            yield from _within(fn.__globals__.get(name), f"the global {name!r}", seen, modules, follow=False)
    elif not isinstance(fn, (types.BuiltinFunctionType, type)):
        yield from _within(_state(fn), f"an attribute of the {type(fn).__name__}", seen, modules)


def _globals(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals(constant)


def _state(owner: Any) -> dict[str, Any]:
    state = dict(getattr(owner, "__dict__", {}))
    for cls in type(owner).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(owner, name):
                state[name] = getattr(owner, name)
    return state


def _within(value: Any, where: str, seen: set[int], modules: bool, *, follow: bool = True) -> Iterator[str]:
    if any(True for _ in tensors(value)):
        yield where
    elif follow and isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        yield from _held(value, seen, modules)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _within(item, where, seen, modules, follow=follow)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _within(item, where, seen, modules, follow=follow)


def refuse_degenerate(arguments: Any, name: str) -> None:
    """Raise `DegenerateInputError` for numbers that are all zero, constant, or drawn from a handful of values."""
    for at, tensor in tensors(arguments):
        problem = _degenerate(tensor)
        if problem:
            raise DegenerateInputError(
                f"{name}: {at} is {problem}; results and times of such inputs say nothing about real ones"
            )


def _degenerate(tensor: Any) -> str:
    import torch

    if not is_tensor(tensor) or tensor.numel() == 0:
        return ""
    numbers = tensor.dtype.is_floating_point or tensor.dtype in (torch.int8, torch.uint8)
    if not numbers:
        return ""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    step = max(flat.numel() // SAMPLED, 1)
    sample = flat[::step][:SAMPLED].to(torch.float64)
    if not bool(torch.isfinite(sample).any()):
        return "not a finite number anywhere"
    if sample.numel() >= 8 and bool((sample == 0).all()):
        return "all zero"
    distinct = int(torch.unique(sample).numel())
    if sample.numel() >= 64 and distinct < FEWEST_VALUES:
        return f"nearly constant: {distinct} distinct value{'s' * (distinct > 1)} among {sample.numel()}"
    return ""
