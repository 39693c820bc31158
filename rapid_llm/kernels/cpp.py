"""C++ kernels for the CPU, compiled on first use into extension modules without any of torch's headers.

A source is compiled for a level of vector extensions, the highest that this CPU has and the compiler knows, so an
artifact serves every machine of its level. The module reads tensors through torch's DLPack exchange API and Python
through its limited API (`csrc/include/rapid_llm/module.h`), and links torch's own OpenMP runtime.
"""

from __future__ import annotations

import os
import platform as _host
import sysconfig
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from rapid_llm import settings
from rapid_llm.platform import cpu_info

from .build import BuildError, GxxCompiler, Unit, build
from .build.compilers import PROBE_S
from .build.extension import import_extension, take
from .build.process import run, spell
from .build.remember import remembered
from .build.toolchain import HOST_FIX, host_command, python_part
from .registry.forking import Lock
from .registry.probes import Probe

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
_locks: Final[defaultdict[_Key, Lock]] = defaultdict(Lock)
"""One a module, so that several are built at once."""
_loaded: Final[dict[_Key, ModuleType]] = {}


def available() -> bool | str:
    """Whether C++ kernels can be built here: True, or why not. Cheap: nothing is compiled."""
    probe = why_not()
    return probe.ok or probe.text


def why_not() -> Probe:
    """The first thing that is missing, with its fix."""
    other = "use a machine that has it; the op's other rows run here"
    if settings.jit() == "off":
        return Probe(False, "RAPID_LLM_JIT=off", fix="unset RAPID_LLM_JIT")
    if _host.machine() not in ("x86_64", "AMD64"):
        return Probe(False, f"the C++ kernels are for x86-64, this machine is {_host.machine()}", fix=other)
    if LEVELS[0].missing:
        return Probe(False, f"the CPU lacks {', '.join(LEVELS[0].missing)}", fix=other)
    _, problem = host_command()
    if problem:
        return Probe(False, problem, fix=HOST_FIX)
    header = python_part()
    return Probe(True) if header.ok else Probe(False, f"{header.name}: {header.text}", fix=header.fix)


def available_bf16() -> bool | str:
    """The same, for rows that are fast only where the CPU multiplies bf16 in hardware."""
    probe = why_not_bf16()
    return probe.ok or probe.text


def why_not_bf16() -> Probe:
    """The first thing that such a row misses, with its fix."""
    if not {"avx512_bf16", "amx_bf16"} & set(cpu_info().isa):
        text = "the CPU has no bf16 arithmetic (avx512_bf16 or amx_bf16)"
        return Probe(False, text, fix="use a machine that has it; the op's other rows run here")
    return why_not()


def levels() -> tuple[Level, ...]:
    """Those that this CPU runs, the lowest first."""
    return tuple(level for level in LEVELS if not level.missing)


def _known(command: tuple[str, ...]) -> list[str]:
    """Names of the levels that a compiler can compile for: GCC 9, say, knows AVX-512 without its bf16 arithmetic."""

    def ask() -> list[str]:
        return [level.name for level in LEVELS if _accepts(command, level)]

    return remembered("levels", command, ask)


def _accepts(command: tuple[str, ...], level: Level) -> bool:
    """Whether the compiler takes a level's options. One that fails otherwise (killed, or out of processes) has not
    answered, and a level must not be taken for unknown for good."""
    line = [*command, *level.flags, "-E", "-x", "c++", os.devnull]
    done = run(line, timeout_s=PROBE_S)
    if done.status and not any(flag in done.err + done.out for flag in level.flags):
        raise BuildError(f"{spell(line)} ended with {done.status}: {(done.err or done.out).strip()[-300:]}")
    return done.status == 0


def load_cpp(name: str, source: str, level: Level | None = None) -> ModuleType:
    """The module `rapid_llm_cpp_<name>` compiled from `csrc/<source>`, built on first use; raises `BuildError`.

    level: of vector extensions; None is the highest that this CPU has and the compiler knows.
    """
    command, problem = host_command()
    if problem:
        raise BuildError(f"cpp/{name}: {problem}")
    key = (name, source, _checked(name, level) if level is not None else _highest(name, command))
    with _locks[key]:
        if key not in _loaded:
            _loaded[key] = take(
                lambda: build(_unit(*key), GxxCompiler(command)),
                lambda path: import_extension(f"rapid_llm_cpp_{name}", path),
            )
        return _loaded[key]


def _checked(name: str, level: Level) -> Level:
    if level.missing:
        raise BuildError(f"cpp/{name}: {level.name} needs {', '.join(level.missing)}, which this CPU lacks")
    return level


def _highest(name: str, command: tuple[str, ...]) -> Level:
    known = _known(command)
    usable = [level for level in levels() if level.name in known]
    if not usable:
        _checked(name, LEVELS[0])
        raise BuildError(f"cpp/{name}: {' '.join(command)} does not take {' '.join(LEVELS[0].flags)}")
    return usable[-1]


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
