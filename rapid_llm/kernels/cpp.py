"""C++ kernels for the CPU, compiled on first use: no torch headers, plain C symbols, loaded with ctypes.

A library is kept under a key of everything that shapes it: source, flags, compiler, vector extensions and OpenMP
runtime. It is built in a directory of its own, loaded there, and renamed into place, so that no process ever sees half
of one and a killed build leaves nothing that another would wait for.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform as _host
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rapid_llm import settings
from rapid_llm.platform import cpu_info

from .registry import KernelError

_log = logging.getLogger(__name__)

SOURCES: Final = Path(__file__).parent / "csrc"
FLAGS: Final = (
    *("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-fPIC", "-shared"),
)
"""NaN, infinities, signed zeros and the order of sums keep their meaning: no -ffast-math."""

NEEDS: Final = ("avx2", "fma", "f16c")
"""Vector extensions that the sources use at least."""

TIMEOUT_S: Final = 300

_lock: Final = threading.RLock()
_loaded: Final[dict[str, ctypes.CDLL]] = {}


class BuildError(KernelError):
    """A C++ kernel did not compile or load: the first error line, the command, and where the whole log lies."""


def available() -> bool | str:
    """Whether C++ kernels can be built here: True, or why not. Cheap: nothing is compiled."""
    if settings.jit() == "off":
        return "RAPID_LLM_JIT=off"
    if _host.machine() not in ("x86_64", "AMD64"):
        return f"the C++ kernels are for x86-64, this machine is {_host.machine()}"
    missing = [i for i in NEEDS if i not in cpu_info().isa]
    if missing:
        return f"the CPU lacks {', '.join(missing)}"
    if _compiler() is None:
        return "no C++ compiler: neither CXX nor c++, g++ or clang++ on PATH names one"
    return True


def available_bf16() -> bool | str:
    """The same, for rows that are fast only where the CPU multiplies bf16 in hardware."""
    if not {"avx512_bf16", "amx_bf16"} & set(cpu_info().isa):
        return "the CPU has no bf16 arithmetic (avx512_bf16 or amx_bf16)"
    return available()


def load_cpp(name: str, source: str) -> ctypes.CDLL:
    """The library compiled from `csrc/<source>`, built on first use; raises `BuildError`."""
    with _lock:
        if name not in _loaded:
            _loaded[name] = _load(name, SOURCES / source)
        return _loaded[name]


def function(library: ctypes.CDLL, name: str, signature: str, result: type | None = None) -> Callable[..., Any]:
    """A C function of `library`; `signature` has one letter an argument: p pointer, n int64, i int, f float."""
    found = getattr(library, name)
    found.argtypes = tuple(_TYPES[letter] for letter in signature)
    found.restype = result
    call: Callable[..., Any] = found
    return call


_TYPES: Final = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}


def _load(name: str, source: Path) -> ctypes.CDLL:
    compiler = _compiler()
    if compiler is None:
        raise BuildError(f"cpp/{name}: {available()}")
    runtime = _openmp()
    key = _key(source, compiler, runtime)
    for root in _roots():
        built = root / f"{name}-{key}" / f"{name}.so"
        if built.is_file():
            try:
                _check_whole(built)
                return ctypes.CDLL(str(built))
            except OSError as error:  # damaged, or built for a system library that has gone: build anew
                _log.warning("cpp/%s: %s does not load (%s); building it again", name, built, error)
                shutil.rmtree(built.parent, ignore_errors=True)
        try:
            root.mkdir(parents=True, exist_ok=True)
            private = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
        except OSError as error:
            _log.info("cpp/%s: %s is not writable (%s)", name, root, error)
            continue
        return _build(name, source, compiler, runtime, private, built)
    raise BuildError(f"cpp/{name}: no directory to build in: {', '.join(map(str, _roots()))} are not writable")


def _build(
    name: str, source: Path, compiler: Path, runtime: tuple[str, ...], private: Path, built: Path
) -> ctypes.CDLL:
    _log.info("compiling the C++ kernel %s, once", name)
    output, log = private / built.name, private / "build.log"
    command = [str(compiler), *FLAGS, str(source), "-o", str(output), *runtime]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)
        text = done.stdout + done.stderr
        failed = done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        text, failed = str(error), True
    if failed:
        log.write_text(" ".join(command) + "\n" + text)
        first = next((line for line in text.splitlines() if "error" in line), text.strip()[:300])
        raise BuildError(f"cpp/{name} does not compile: {first}\n  command: {' '.join(command)}\n  log: {log}")
    try:
        library = ctypes.CDLL(str(output))
        _digest_file(output).write_text(_digest(output))
    except OSError as error:
        raise BuildError(
            f"cpp/{name}: {compiler} left nothing that loads: {error}\n  command: {' '.join(command)}"
        ) from None
    try:
        private.rename(built.parent)
    except OSError:  # another process published the same key first; ours is loaded and equal
        shutil.rmtree(private, ignore_errors=True)
    return library


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _check_whole(library: Path) -> None:
    """Raise OSError unless the file is the one that was built: mapping a truncated library kills the process."""
    if _digest_file(library).read_text() != _digest(library):
        raise OSError("its content differs from what was built")


def _compiler() -> Path | None:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found is not None:
            return Path(found).resolve()
    return None


def _openmp() -> tuple[str, ...]:
    """torch's own OpenMP runtime as a link input: a second runtime's threads would fight with torch's for the cores."""
    import torch  # here, so that asking `available()` does not load it

    return tuple(str(p) for p in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1])


def _key(source: Path, compiler: Path, runtime: tuple[str, ...]) -> str:
    state = compiler.stat()
    info = cpu_info()
    headers = [path.read_text() for path in sorted((SOURCES / "include").glob("*.h"))]
    parts = [
        *headers,
        source.read_text(),
        *FLAGS,
        str(compiler),
        str(state.st_mtime_ns),
        str(state.st_size),
        info.model,
        *info.isa,
    ]
    parts += [Path(r).name + str(Path(r).stat().st_size) for r in runtime]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _roots() -> tuple[Path, ...]:
    """Where libraries are kept: the cache, or a directory of this user's own where the cache cannot be written."""
    return (settings.cache_dir() / "cpp", Path(tempfile.gettempdir()) / f"rapid_llm-{os.getuid()}" / "cpp")
