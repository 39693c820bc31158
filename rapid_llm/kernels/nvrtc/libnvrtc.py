"""libnvrtc by ctypes: where it is, which version, and one compile from texts in memory to a cubin.

The library is found and its version told by looking at files; it is loaded only to compile, because it is 100 MB that a
process whose cubins are all in the store never needs.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

from ..build import torch_facts
from ..build.errors import CompileFailed
from ..registry.forking import Lock

_NAME: Final = re.compile(r"libnvrtc(-[0-9a-f]{8})?\.so(\.\d+)*")
_BUILTINS: Final = re.compile(r"libnvrtc-builtins(-[0-9a-f]{8})?\.so((?:\.\d+)*)")
_SYSTEM: Final = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
_lock: Final = Lock()
"""NVRTC may be called by several threads; its first load may not."""


@dataclass(frozen=True)
class Library:
    """One libnvrtc. path: None where none was found, and then `reason` says where it was looked for."""

    path: Path | None
    searched: tuple[str, ...] = ()

    @cached_property
    def reason(self) -> str:
        """Why nothing can be compiled with it; empty if it loads."""
        if self.path is None:
            where = ", ".join(self.searched) or "any directory"
            return f"no libnvrtc.so in {where}; pip install nvidia-cuda-nvrtc brings one"
        try:
            self._functions  # noqa: B018 - the load is what is asked for
        except (OSError, AttributeError) as error:
            return f"{self.path} cannot be loaded: {error}"
        return ""

    @cached_property
    def identity(self) -> str:
        """The version and size of the file: the same for another spelling of its path, another for another release."""
        if self.path is None:
            raise CompileFailed("nvrtc", self.reason, first=self.reason)
        for file in _builtins(self.path):
            found = _BUILTINS.fullmatch(file.name)
            if found is not None and found[2].count(".") >= 2:
                version = ".".join(found[2].split(".")[1:3])
                break
        else:
            major, minor = ctypes.c_int(), ctypes.c_int()
            self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
            version = f"{major.value}.{minor.value}"
        return f"{version}, {self.path.stat().st_size} bytes"

    @cached_property
    def _functions(self) -> ctypes.CDLL:
        with _lock:
            # Opened by its bare name in a compile, which finds it only where it is loaded already.
            for file in _builtins(Path(str(self.path))):
                ctypes.CDLL(str(file))
            library = ctypes.CDLL(str(self.path))
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._functions, name)(*arguments)
        if status != 0:
            text = self._functions.nvrtcGetErrorString(status).decode()
            raise CompileFailed("nvrtc", f"{name}: {text}", status, first=f"{name}: {text}")

    def compile(
        self,
        name: str,
        source: str,
        headers: Mapping[str, str],
        options: Sequence[str],
        expressions: Sequence[str],
    ) -> tuple[bytes, dict[str, str], str]:
        """The cubin of `source`, the symbol of each name expression in it, and what the compiler said.

        headers: all that an `#include` can find, by the name that it is included under; no file is read. Raises
        `CompileFailed`.
        """
        if self.reason:
            raise CompileFailed("nvrtc", self.reason, first=self.reason)
        program = ctypes.c_void_p()
        count = len(headers)
        self._call(
            "nvrtcCreateProgram",
            *(ctypes.byref(program), source.encode(), name.encode(), count),
            (ctypes.c_char_p * count)(*(text.encode() for text in headers.values())),
            (ctypes.c_char_p * count)(*(key.encode() for key in headers)),
        )
        try:
            for expression in expressions:
                self._call("nvrtcAddNameExpression", program, expression.encode())
            given = [option.encode() for option in options]
            status = self._functions.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
            said = self._text(program, "nvrtcGetProgramLog")
            if status != 0:
                raise CompileFailed(f"nvrtc {' '.join(options)} {name}", said, status)
            symbols = {expression: self._symbol(program, expression) for expression in expressions}
            return self._bytes(program, "nvrtcGetCUBIN"), symbols, said
        finally:
            self._functions.nvrtcDestroyProgram(ctypes.byref(program))

    def _symbol(self, program: ctypes.c_void_p, expression: str) -> str:
        symbol = ctypes.c_char_p()
        self._call("nvrtcGetLoweredName", program, expression.encode(), ctypes.byref(symbol))
        return (symbol.value or b"").decode()

    def _text(self, program: ctypes.c_void_p, name: str) -> str:
        return self._bytes(program, name).rstrip(b"\0").decode(errors="replace")

    def _bytes(self, program: ctypes.c_void_p, name: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{name}Size", program, ctypes.byref(size))
        held = ctypes.create_string_buffer(size.value)
        self._call(name, program, held)
        return held.raw


@cache
def library() -> Library:
    """The libnvrtc of this machine: torch's own before a toolkit's, and of torch's CUDA version before others."""
    folders = list(dict.fromkeys(_folders()))
    found = [path for folder in folders for path in _in(folder)]
    major = torch_facts()["torch_cuda"].partition(".")[0]
    same = [path for path in found if f".so.{major}" in path.name]
    best = next(iter(same or found), None)
    return Library(best, tuple(folders))


def _folders() -> Iterator[str]:
    for package, below in (("nvidia", ("cu*/lib", "cuda_nvrtc/lib")), ("torch", ("lib",))):
        spec = importlib.machinery.PathFinder.find_spec(package)
        for root in spec.submodule_search_locations or () if spec is not None else ():
            for pattern in below:
                yield from sorted(map(str, Path(root).glob(pattern)), reverse=True)
    yield os.path.join(sys.prefix, "lib")
    for toolkit in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if toolkit:
            yield from (os.path.join(toolkit, "lib64"), os.path.join(toolkit, "lib"))
    yield from (folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder)
    yield from _SYSTEM


def _in(folder: str) -> list[Path]:
    try:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
    except OSError:  # a place that this machine has not
        return []
    return [Path(os.path.realpath(os.path.join(folder, name))) for name in sorted(names, key=_version, reverse=True)]


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.partition(".so")[2].split(".") if part)


def _builtins(path: Path) -> list[Path]:
    """The files of the compiler's own headers beside it."""
    major = path.name.partition(".so.")[2].partition(".")[0]
    found = []
    for name in sorted(os.listdir(path.parent), key=len, reverse=True):
        match = _BUILTINS.fullmatch(name)
        if match is not None and (not major or match[2].startswith(f".{major}.")):
            found.append(path.parent / name)
    return found
