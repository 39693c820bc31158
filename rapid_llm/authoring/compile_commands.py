"""compile_commands.json: how each .cu and .cpp of the package is compiled, for editors and language servers."""

from __future__ import annotations

import importlib.machinery
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rapid_llm.kernels import build, cpp, jit
from rapid_llm.kernels.build.toolchain import host_command

from .request import checkout, is_checkout

_ARCH = "sm_90"


def entries(arch: str = _ARCH) -> list[dict[str, Any]]:
    """One entry a source, by file: `directory`, `file`, `arguments`, `output`."""
    return sorted(_entries(arch), key=lambda entry: str(entry["file"]))


def write(file: Path, arch: str = _ARCH) -> int:
    """Write the entries to `file`, whole or not at all; how many there are."""
    listed = entries(arch)
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.resolve().parent)
    with os.fdopen(descriptor, "w") as out:
        json.dump(listed, out, indent=1)
    os.chmod(name, 0o644)
    os.replace(name, file)
    return len(listed)


def _entries(arch: str) -> Iterator[dict[str, Any]]:
    nvcc = [str(build.toolchain().nvcc or "nvcc")]
    python = Path(sysconfig.get_path("include"))
    for source in sorted(jit.SOURCES.rglob("*.cu")):
        unit = jit._unit(source.stem, str(source), ("-O3",), arch)
        flags = [*build.gencode(arch), *unit.flags, *_includes(unit.include_dirs, unit.system_dirs)]
        yield _entry(jit.SOURCES, nvcc, flags, source)
    compiler = list(host_command()[0]) or ["c++"]
    level = cpp.levels()[-1] if cpp.levels() else cpp.LEVELS[0]
    for source in sorted(cpp.SOURCES.rglob("*.cpp")):
        own = [f"-DRAPID_LLM_MODULE_NAME=rapid_llm_cpp_{source.stem}", "-DRAPID_LLM_CPU"]
        flags = [*(f for f in cpp.FLAGS if f != "-shared"), *level.flags, *own]
        flags += _includes((cpp.SOURCES, cpp.SOURCES / "include"), (python,))
        yield _entry(cpp.SOURCES, compiler, flags, source)
    yield from _extension(nvcc, arch, python)


def _extension(nvcc: list[str], arch: str, python: Path) -> Iterator[dict[str, Any]]:
    """The sources of the AOT extension, which read torch's headers."""
    root = checkout() / "csrc"
    if not is_checkout(checkout()) or not root.is_dir():
        return
    torch = importlib.machinery.PathFinder.find_spec("torch")
    system = [Path(torch.origin).parent / "include"] if torch is not None and torch.origin else []
    own = (root / "include", jit.SOURCES, jit.SOURCES / "include")
    flags = [*build.gencode(arch), "-std=c++20", "-O3", "-DUSE_CUDA", *_includes(own, (*system, python))]
    for source in sorted([*root.rglob("*.cu"), *root.rglob("*.cc")]):
        yield _entry(root, nvcc, [*flags, *(["-x", "cu"] if source.suffix == ".cc" else [])], source)


def _includes(own: tuple[Path, ...], system: tuple[Path, ...]) -> list[str]:
    found = [word for folder in own for word in ("-I", str(folder))]
    return found + [word for folder in system for word in ("-isystem", str(folder))]


def _entry(directory: Path, compiler: list[str], flags: list[str], source: Path) -> dict[str, Any]:
    output = f"{source.stem}.o"
    arguments = [*compiler, *flags, "-c", str(source), "-o", output]
    return {"directory": str(directory), "file": str(source), "arguments": arguments, "output": output}
