"""C++ kernels for the CPU, compiled on first use into extension modules without any of torch's headers.

A source is compiled for a level of vector extensions, the highest that this CPU has, so an artifact serves every
machine of its level. The module reads tensors through torch's DLPack exchange API and Python through its limited API
(`csrc/include/rapid_llm/module.h`), and links torch's own OpenMP runtime.
"""

from __future__ import annotations

import platform as _host
import sysconfig
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from rapid_llm import settings
from rapid_llm.platform import cpu_info

from .build import BuildError, GxxCompiler, Unit, build
from .build.extension import import_extension
from .build.toolchain import host_command, python_part

SOURCES: Final = Path(__file__).parent / "csrc"
INCLUDES: Final = (SOURCES, SOURCES / "include")
FLAGS: Final = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden"),
)
"""NaN, infinities, signed zeros and the order of sums keep their meaning: no -ffast-math."""


@dataclass(frozen=True, slots=True)
class Level:
    """A set of vector extensions that a source is compiled for; `isa` has the names of `CPUInfo.isa`."""

    name: str
    isa: tuple[str, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """What this CPU lacks of it."""
        return tuple(i for i in self.isa if i not in cpu_info().isa)

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(f"-m{i.replace('_', '')}" for i in self.isa)


_AVX2: Final = ("avx2", "fma", "f16c")
_AVX512: Final = (*_AVX2, "avx512f", "avx512bw", "avx512vl")
LEVELS: Final = (
    *(Level("avx2", _AVX2), Level("avx512", _AVX512)),
    Level("avx512_bf16", (*_AVX512, "avx512_bf16")),
)
"""The lowest first; each has the extensions of those before it."""

_FACTS: Final = {"python": "abi3, 3.11 and later", "tensors": "DLPack exchange API 1"}

_Key = tuple[str, str, Level]
_locks: Final[defaultdict[_Key, threading.Lock]] = defaultdict(threading.Lock)
"""One a module, so that several are built at once."""
_loaded: Final[dict[_Key, ModuleType]] = {}


def available() -> bool | str:
    """Whether C++ kernels can be built here: True, or why not. Cheap: nothing is compiled."""
    if settings.jit() == "off":
        return "RAPID_LLM_JIT=off"
    if _host.machine() not in ("x86_64", "AMD64"):
        return f"the C++ kernels are for x86-64, this machine is {_host.machine()}"
    if LEVELS[0].missing:
        return f"the CPU lacks {', '.join(LEVELS[0].missing)}"
    _, problem = host_command()
    if problem:
        return problem
    header = python_part()
    return True if header.ok else f"{header.name}: {header.text}; {header.fix}"


def available_bf16() -> bool | str:
    """The same, for rows that are fast only where the CPU multiplies bf16 in hardware."""
    if not {"avx512_bf16", "amx_bf16"} & set(cpu_info().isa):
        return "the CPU has no bf16 arithmetic (avx512_bf16 or amx_bf16)"
    return available()


def levels() -> tuple[Level, ...]:
    """Those that this CPU runs, the lowest first."""
    return tuple(level for level in LEVELS if not level.missing)


def load_cpp(name: str, source: str, level: Level | None = None) -> ModuleType:
    """The module `rapid_llm_cpp_<name>` compiled from `csrc/<source>`, built on first use; raises `BuildError`.

    level: of vector extensions; None is the highest that this CPU has.
    """
    usable = levels()
    if not usable or (level is not None and level.missing):
        lowest = level or LEVELS[0]
        raise BuildError(f"cpp/{name}: {lowest.name} needs {', '.join(lowest.missing)}, which this CPU lacks")
    key = (name, source, level or usable[-1])
    with _locks[key]:
        if key not in _loaded:
            command, problem = host_command()
            if problem:
                raise BuildError(f"cpp/{name}: {problem}")
            artifact = build(_unit(*key), GxxCompiler(command))
            _loaded[key] = import_extension(f"rapid_llm_cpp_{name}", artifact.path)
        return _loaded[key]


def _unit(name: str, source: str, level: Level) -> Unit:
    own = ("-DRAPID_LLM_CPU", f"-DRAPID_LLM_MODULE_NAME=rapid_llm_cpp_{name}")
    return Unit(
        path="cpp",
        name=name,
        source=SOURCES / source,
        output=f"{name}.abi3.so",
        flags=(*FLAGS, *level.flags, *own),
        include_dirs=INCLUDES,
        link_inputs=_openmp(),
        arch=level.name,
        facts=_FACTS,
        system_dirs=(Path(sysconfig.get_path("include")),),
    )


def _openmp() -> tuple[Path, ...]:
    """torch's own OpenMP runtime as a link input: a second runtime's threads would fight with torch's for the cores."""
    import torch  # here, so that asking `available()` does not load it

    return tuple(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1])
