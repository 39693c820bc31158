"""C++ kernels for the CPU, compiled on first use: no torch headers, plain C symbols, loaded with ctypes.

The build engine keeps each library under a key of everything that shapes it: source, headers, flags, compiler, vector
extensions and OpenMP runtime.
"""

from __future__ import annotations

import ctypes
import platform as _host
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rapid_llm import settings
from rapid_llm.platform import cpu_info

from .build import BuildError, GxxCompiler, Unit, build, cpu_arch
from .build.toolchain import host_command

SOURCES: Final = Path(__file__).parent / "csrc"
FLAGS: Final = (
    *("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-fPIC", "-shared"),
)
"""NaN, infinities, signed zeros and the order of sums keep their meaning: no -ffast-math."""

NEEDS: Final = ("avx2", "fma", "f16c")
"""Vector extensions that the sources use at least."""

_locks: Final[defaultdict[str, threading.Lock]] = defaultdict(threading.Lock)
"""One a library, so that several are built at once."""
_loaded: Final[dict[str, ctypes.CDLL]] = {}


def available() -> bool | str:
    """Whether C++ kernels can be built here: True, or why not. Cheap: nothing is compiled."""
    if settings.jit() == "off":
        return "RAPID_LLM_JIT=off"
    if _host.machine() not in ("x86_64", "AMD64"):
        return f"the C++ kernels are for x86-64, this machine is {_host.machine()}"
    missing = [i for i in NEEDS if i not in cpu_info().isa]
    if missing:
        return f"the CPU lacks {', '.join(missing)}"
    _, problem = host_command()
    return problem or True


def available_bf16() -> bool | str:
    """The same, for rows that are fast only where the CPU multiplies bf16 in hardware."""
    if not {"avx512_bf16", "amx_bf16"} & set(cpu_info().isa):
        return "the CPU has no bf16 arithmetic (avx512_bf16 or amx_bf16)"
    return available()


def load_cpp(name: str, source: str) -> ctypes.CDLL:
    """The library compiled from `csrc/<source>`, built on first use; raises `BuildError`."""
    with _locks[name]:
        if name not in _loaded:
            command, problem = host_command()
            if problem:
                raise BuildError(f"cpp/{name}: {problem}")
            _loaded[name] = ctypes.CDLL(str(build(_unit(name, source), GxxCompiler(command)).path))
        return _loaded[name]


def function(library: ctypes.CDLL, name: str, signature: str, result: type | None = None) -> Callable[..., Any]:
    """A C function of `library`; `signature` has one letter an argument: p pointer, n int64, i int, f float."""
    found = getattr(library, name)
    found.argtypes = tuple(_TYPES[letter] for letter in signature)
    found.restype = result
    call: Callable[..., Any] = found
    return call


_TYPES: Final = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}


def _unit(name: str, source: str) -> Unit:
    return Unit("cpp", name, SOURCES / source, f"{name}.so", FLAGS, link_inputs=_openmp(), arch=cpu_arch())


def _openmp() -> tuple[Path, ...]:
    """torch's own OpenMP runtime as a link input: a second runtime's threads would fight with torch's for the cores."""
    import torch  # here, so that asking `available()` does not load it

    return tuple(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1])
