"""What a CUDA build would use, part by part: found, or why not and what to do. Nothing is compiled to find out.

nvcc is looked for where it was named (CUDA_HOME, CUDA_PATH), then on PATH, then in /usr/local/cuda and among Python's
packages. The toolkit's root is what nvcc itself reports: an nvcc on PATH may be a wrapper far from it.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import re
import shlex
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from .errors import BuildError
from .facts import torch_facts
from .process import programs, run, spell
from .remember import remembered

_PROBE_S: Final = 30.0
HOST_FIX: Final = "install g++, or set CXX to a C++ compiler"
_NO_TOOLKIT: Final = "install the CUDA toolkit (nvcc), or set CUDA_HOME to where it is"


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that a build needs: whether it is there, what was found or is wrong, the fix, and where it lies."""

    name: str
    ok: bool
    text: str
    fix: str = ""
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Toolchain:
    """nvcc with all that it needs. version: (13, 0). host: the command of its C++ compiler. ccbin: what nvcc is told
    about it, None where it finds it by itself. includes, libraries: the toolkit's folders. archs: what it compiles for.
    """

    parts: tuple[Part, ...]
    nvcc: Path | None = None
    nvcc_text: str = ""
    version: tuple[int, int] | None = None
    root: Path | None = None
    host: tuple[str, ...] = ()
    ccbin: str | None = None
    includes: tuple[Path, ...] = ()
    libraries: tuple[Path, ...] = ()
    archs: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every part is there."""
        return all(part.ok for part in self.parts)

    def part(self, name: str) -> Part:
        """The part of this name."""
        return next(part for part in self.parts if part.name == name)

    def reason(self, *names: str) -> str:
        """What the first missing part (of these, or of all) says, with its fix; '' if none is missing."""
        for part in self.parts:
            if not part.ok and (not names or part.name in names):
                return f"{part.name}: {part.text}" + (f"; {part.fix}" if part.fix else "")
        return ""

    def compiles_for(self, arch: str) -> bool:
        """Whether this nvcc knows the architecture: `sm_90`, `sm_90a`, `compute_90`."""
        number = re.sub(r"\D", "", arch)
        return f"sm_{number}" in self.archs


@dataclass(frozen=True, slots=True)
class _Report:
    """What nvcc says of itself."""

    text: str
    version: tuple[int, int]
    root: Path
    includes: tuple[Path, ...]
    libraries: tuple[Path, ...]
    archs: tuple[str, ...]


def toolchain() -> Toolchain:
    """This machine's, under the environment as it is now."""
    names = ("CUDA_HOME", "CUDA_PATH", "PATH", "CXX", "NVCC_CCBIN")
    return _toolchain(tuple(os.environ.get(name, "") for name in names))


@cache
def _toolchain(environment: tuple[str, ...]) -> Toolchain:
    return probe()


def probe() -> Toolchain:
    """Look at every part now."""
    nvcc, where = find_nvcc()
    host, ccbin, compiler = _host_part()
    python = python_part()
    if nvcc is None:
        return Toolchain((Part("nvcc", False, where, _NO_TOOLKIT), compiler, python), host=host, ccbin=ccbin)
    try:
        report = _report(nvcc)
    except BuildError as error:
        fix = _NO_TOOLKIT if compiler.ok else compiler.fix  # nvcc runs the host compiler even to look at itself
        broken = Part("nvcc", False, f"{nvcc} does not run: {error}", fix, nvcc)
        return Toolchain((broken, compiler, python), host=host, ccbin=ccbin)
    number = ".".join(map(str, report.version))
    parts = (
        Part("nvcc", True, f"{number}, {where}", path=nvcc),
        compiler,
        _headers_part(report),
        _library_part(report),
        python,
        _archs_part(report, number),
        _torch_part(report.version),
    )
    return Toolchain(
        parts=parts,
        nvcc=nvcc,
        nvcc_text=report.text,
        version=report.version,
        root=report.root,
        host=host,
        ccbin=ccbin,
        includes=report.includes,
        libraries=report.libraries,
        archs=report.archs,
    )


def find_nvcc() -> tuple[Path | None, str]:
    """nvcc and how it was found; or None and where it was looked for."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home:
            found = Path(home, "bin", "nvcc")
            if os.access(found, os.X_OK):
                return found, f"from {variable}"
            return None, f"{variable}={home} has no bin/nvcc"
    on_path = shutil.which("nvcc")
    if on_path is not None:
        return Path(on_path), "from PATH"
    packages = importlib.machinery.PathFinder.find_spec("nvidia")
    folders = [Path(p) for p in packages.submodule_search_locations or ()] if packages is not None else []
    installed = [path for folder in folders for path in sorted(folder.glob("*/bin/nvcc"))]
    for found in (Path("/usr/local/cuda/bin/nvcc"), *installed):
        if os.access(found, os.X_OK):
            return found, f"in {found.parent}"
    return None, "neither CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda nor a Python package has one"


def host_command() -> tuple[tuple[str, ...], str]:
    """The C++ compiler's command and ''; or () and why there is none. A CXX that names nothing is not passed over."""
    given = os.environ.get("CXX", "").strip()
    if given:
        try:
            words = tuple(shlex.split(given))
        except ValueError as error:
            return (), f"CXX={given!r} cannot be read as a command: {error}"
        named = programs(words)  # what follows the first argument may be an argument's value: -I /opt/include
        missing = [word for word in named if shutil.which(word) is None]
        if missing or not named:
            return (), f"CXX={given} names no program: {missing[0] if missing else words[0]} is not on PATH"
        return words, ""
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name) is not None:
            return (name,), ""
    return (), "no C++ compiler: CXX is unset, and neither c++, g++ nor clang++ is on PATH"


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver runs, asked without initialising CUDA; None where there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int(0)
        status = library.cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if status != 0 or not number.value else (number.value // 1000, number.value % 1000 // 10)


def _report(nvcc: Path) -> _Report:
    lines = remembered("nvcc", [str(nvcc)], lambda: _ask_nvcc(nvcc), lambda answer: [f"{answer[1]}/bin/nvcc"])
    text, root, includes, libraries, archs = lines
    release = re.search(r"release (\d+)\.(\d+)", text)
    if release is None:
        raise BuildError(f"{nvcc} --version states no release: {text}")
    return _Report(
        text=text,
        version=(int(release[1]), int(release[2])),
        root=Path(root),
        includes=tuple(map(Path, includes.split(os.pathsep))),
        libraries=tuple(map(Path, libraries.split(os.pathsep))),
        archs=tuple(archs.split()),
    )


def _ask_nvcc(nvcc: Path) -> list[str]:
    """Version, root, include and library folders, architectures. Three short runs, about 10 ms each."""
    version = _said([str(nvcc), "--version"])
    plan = _said([str(nvcc), "--dryrun", "-E", "-x", "cu", os.devnull])
    archs = _said([str(nvcc), "--list-gpu-code"])
    top = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
    root = Path(os.path.realpath(top[1].strip() if top is not None else nvcc.resolve().parent.parent))
    includes = _folders(plan, "INCLUDES", "-I") or [root / "include"]
    libraries = _folders(plan, "LIBRARIES", "-L") or [root / "lib64"]
    text = " ".join(line.strip() for line in version.splitlines() if re.search(r"release|^Build", line))
    found = sorted(set(re.findall(r"sm_\d+", archs)), key=lambda name: int(name[3:]))
    join = os.pathsep.join
    return [text, str(root), join(map(str, includes)), join(map(str, libraries)), " ".join(found)]


def _folders(plan: str, variable: str, option: str) -> list[Path]:
    line = re.search(rf"^#\$ {variable}=(.*)$", plan, re.MULTILINE)
    words = shlex.split(line[1]) if line is not None else []
    return [Path(os.path.realpath(word[len(option) :])) for word in words if word.startswith(option)]


def _said(command: Sequence[str]) -> str:
    done = run(command, timeout_s=_PROBE_S)
    if done.status != 0:
        raise BuildError(f"{spell(command)} ended with {done.status}: {(done.err or done.out).strip()[:300]}")
    return done.out + done.err


def _host_part() -> tuple[tuple[str, ...], str | None, Part]:
    """The host compiler's command, what nvcc must be told about it, and the part."""
    name, fix = "host compiler", HOST_FIX
    ccbin = os.environ.get("NVCC_CCBIN", "").strip()
    command, problem = host_command()
    told = None
    if ccbin:  # nvcc reads the variable itself
        command, problem = (ccbin,), "" if shutil.which(ccbin) else f"NVCC_CCBIN={ccbin} names no program"
    elif os.environ.get("CXX"):  # a launcher in front (ccache) is not for nvcc, which wants the compiler alone
        told = next(reversed(programs(command)), None)
    elif shutil.which("g++") and shutil.which("gcc"):  # what nvcc takes by itself, whatever c++ may be
        command, problem = ("g++",), ""
    elif command:
        told = command[0]
    if problem:
        return (), None, Part(name, False, problem, fix)
    try:
        from .compilers import version_text

        text = version_text(command)
    except BuildError as error:
        return command, told, Part(name, False, f"{spell(command)} does not run: {error}", fix)
    return command, told, Part(name, True, text, path=Path(shutil.which(command[0]) or command[0]))


def _headers_part(report: _Report) -> Part:
    name = "CUDA headers"
    header = next((f / "cuda_runtime.h" for f in report.includes if (f / "cuda_runtime.h").is_file()), None)
    if header is None:
        looked = ", ".join(map(str, report.includes))
        return Part(name, False, f"no cuda_runtime.h in {looked}", "install the toolkit's cudart development package")
    try:
        text = (header.parent / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError as error:
        return Part(name, False, f"{header.parent}/cuda_runtime_api.h: {error}", "install the toolkit again", header)
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    number = int(found[1]) if found is not None else 0
    have, want = f"{number // 1000}.{number % 1000 // 10}", f"{report.version[0]}.{report.version[1]}"
    if have != want:
        text = f"mixed toolkit: nvcc is {want}, the headers in {header.parent} are {have}"
        return Part(name, False, text, f"install headers of {want}, or set CUDA_HOME to one whole toolkit", header)
    return Part(name, True, have, path=header)


def _library_part(report: _Report) -> Part:
    names = ("libcudart_static.a", "libcudart.so")
    for folder in report.libraries:
        for name in names:
            if (folder / name).is_file():
                return Part("cudart", True, name, path=folder / name)
    looked = ", ".join(map(str, report.libraries))
    return Part("cudart", False, f"neither {' nor '.join(names)} in {looked}", "install the toolkit's cudart library")


def python_part() -> Part:
    """This interpreter's header, which every extension module includes."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if header.is_file():
        return Part("Python.h", True, f"of Python {sysconfig.get_python_version()}", path=header)
    fix = "install this Python's development files (Debian, Ubuntu: apt-get install python3-dev)"
    return Part("Python.h", False, f"{header} does not exist", fix, header)


def _archs_part(report: _Report, number: str) -> Part:
    if not report.archs:
        return Part("architectures", False, f"nvcc {number} lists none", "install the toolkit again (ptxas)")
    return Part("architectures", True, " ".join(report.archs))


def _torch_part(version: tuple[int, int]) -> Part:
    """Kernels use neither torch's headers nor its CUDA libraries, so only a driver too old for nvcc is a reason."""
    ours, theirs = ".".join(map(str, version)), torch_facts()["torch_cuda"]
    driver = driver_cuda()
    if driver is not None and driver[0] < version[0]:
        text = f"nvcc is {ours}, torch's CUDA is {theirs}, and the driver runs CUDA {driver[0]}.{driver[1]} at most"
        return Part("torch", False, text, f"use a toolkit of CUDA {driver[0]}, or a newer driver")
    if theirs == "None":
        return Part("torch", True, "built without CUDA: kernels compile here and run elsewhere")
    return Part(
        "torch",
        True,
        f"nvcc is {ours}, torch's CUDA is {theirs}; the driver runs both"
        if driver
        else f"nvcc is {ours}, torch's CUDA is {theirs}; there is no driver here",
    )
