"""Stand-ins for `triton` and `triton.language` until a kernel is needed.

Importing Triton takes some 0.2 s and 80 MB. A torch that is built for no GPU launches no kernel, so modules that
declare kernels get these names there: `@triton.jit` keeps the function, `tl.constexpr(1)` keeps the call. `settle`
makes the real thing of everything that was kept, also where modules refer to each other's kernels; Triton reads a
kernel's globals.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class Kernel:
    """A function under `@triton.jit`. `real` is the kernel once settled."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.function = function
        self.options = options
        self.real: Any = None
        self.__name__ = function.__name__
        self.__module__ = function.__module__
        _kernels.append(self)


class Name:
    """An attribute of Triton, by its path."""

    def __init__(self, *path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Name:
        if name.startswith("__"):  # introspection (inspect, copy, pickle, doctest) must not take this for anything
            raise AttributeError(name)
        return Name(*self._path, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._path == ("triton", "jit"):
            return Kernel(args[0], kwargs) if args else partial(self, **kwargs)
        return Result(self, args, kwargs)

    def _settled(self, triton: Any) -> Any:
        found = triton
        for name in self._path[1:]:
            found = getattr(found, name)
        return found


class Result:
    """What a call of a `Name` would have given."""

    def __init__(self, name: Name, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._made = (name, args, kwargs)

    def _settled(self, triton: Any) -> Any:
        name, args, kwargs = self._made
        return name._settled(triton)(*args, **kwargs)


_kernels: list[Kernel] = []


def settle(triton: Any) -> None:
    """Make kernels of the functions that were kept, and put the real objects in their modules' globals; triton: the
    imported package, or None where it cannot be imported, which leaves the functions as they are."""
    for kernel in _kernels:
        kernel.real = kernel.function if triton is None else triton.jit(kernel.function, **kernel.options)
    spaces = {id(kernel.function.__globals__): kernel.function.__globals__ for kernel in _kernels}
    for space in spaces.values():
        for name, value in list(space.items()):
            if isinstance(value, Kernel):
                space[name] = value.real
            elif isinstance(value, Name | Result) and triton is not None:
                space[name] = value._settled(triton)
    _kernels.clear()
