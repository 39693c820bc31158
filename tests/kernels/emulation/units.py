"""Copies of the package's CUDA sources, translated, with planted faults that can be switched on, and their compiles."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from rapid_llm.kernels.build.toolchain import HOST_FIX, host_command, python_part
from rapid_llm.kernels.jit import SOURCES

from .translate import Untranslatable, translate

HERE: Final = Path(__file__).parent
UNITS: Final = tuple(sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.cu")))

FLAGS: Final = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-fvisibility=hidden", "-x", "c++")
DEFINES: Final = ("-D__CUDACC__=1", "-D__CUDA_ARCH__=900")
FIRST: Final = "first.h"
"""A header that every unit includes before all else: the runtime's stand-in."""
SANITIZE: Final = ("-fsanitize=alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero",)
"""Reported by sanitizer.h."""

_DEVICES: Final = ("kCPU = 1, kCUDA = 2", "kCPU = 2, kCUDA = 1")


@dataclass(frozen=True, slots=True)
class Fault:
    """An expression of a source and what stands in its place while the fault is in force.

    row: whose cases must refuse it, saying `says`; or without `cases`, the calls beyond them. after: what comes before
    the expression, where it alone is not unique.
    """

    row: str
    file: str
    right: str
    wrong: str
    after: str = ""
    cases: bool = True
    says: str = ""


def copy_sources(to: Path, faults: Iterable[Fault] = ()) -> None:
    """Write translated copies of all that a `.cu` may include; tensors of the CPU pass for CUDA's.

    A copy that cannot be made is an #error, so that only the units which include it fail, and say why.
    """
    faults = tuple(faults)
    for path in (*SOURCES.rglob("*.cu"), *SOURCES.rglob("*.cuh"), *SOURCES.rglob("*.h")):
        name = path.relative_to(SOURCES).as_posix()
        text = path.read_text()
        for number, fault in enumerate(faults, start=1):
            if fault.file == name:
                either = f"(::emulation::planted({number}) ? ({fault.wrong}) : ({fault.right}))"
                text = _replace(text, fault.after + fault.right, fault.after + either, name)
        if name == "include/rapid_llm/module.h":
            text = _replace(text, *_DEVICES, name)
        copy = to / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            copy.write_text(translate(text, name))
        except Untranslatable as error:
            copy.write_text("#error " + " ".join(str(error).split()))


def _replace(text: str, old: str, new: str, name: str) -> str:
    if text.count(old) != 1:
        raise Untranslatable(f"{name} has {text.count(old)} times what must be there once: {old}; mend the emulation")
    return text.replace(old, new)


def unavailable() -> str:
    """Why nothing can be emulated here; '' where it can."""
    _, missing = host_command()
    if missing:
        return f"{missing}; {HOST_FIX}"
    python = python_part()
    return "" if python.ok else f"{python.text}; {python.fix}"


def shared(factory: pytest.TempPathFactory) -> Path:
    """The folder that all test processes of a session have for what they compile once."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulated"
    folder.mkdir(exist_ok=True)
    return folder


def precompiled(folder: Path) -> Path:
    """`folder` with the stand-ins as the compiler reads them fastest; of several that ask, one compiles them.

    Raises AssertionError with the compiler's words.
    """
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        header = folder / FIRST
        if not header.exists():
            draft = folder / f"draft-{FIRST}"
            draft.write_text('#include "cuda_runtime.h"\n')
            flags = [flag for flag in FLAGS if flag not in ("-x", "c++", "-shared")]
            made = header.with_name(f"{FIRST}.gch")
            done = _compile([*flags, *SANITIZE, *DEFINES, "-x", "c++-header"], (HERE,), draft, made)
            assert done.returncode == 0, done.stderr[:4000]
            draft.rename(header)
    return folder


def compile_unit(
    sources: Path, source: Path, output: Path, *flags: str, first: Path
) -> subprocess.CompletedProcess[str]:
    """One source against the copies; the stand-ins come first, and first among the folders of headers. first: what
    `precompiled` returned."""
    folders = (first, HERE, sources, sources / "include", Path(sysconfig.get_path("include")))
    return _compile([*FLAGS, *SANITIZE, *DEFINES, "-include", FIRST, *flags], folders, source, output)


def _compile(
    flags: list[str], folders: tuple[Path, ...], source: Path, output: Path
) -> subprocess.CompletedProcess[str]:
    includes = [word for folder in folders for word in ("-I", str(folder))]
    command = [*host_command()[0], *flags, *includes, str(source), "-o", str(output)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
