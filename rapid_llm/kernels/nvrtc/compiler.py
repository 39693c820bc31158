"""`NvrtcCompiler`: from a `.cuh` to a file that holds a cubin and, behind it, the symbols of its template instances.

No nvcc, no host compiler, no include directory. The headers are read here and handed over in memory, and only those
that a scan of the `#include` lines finds: what is not in the key cannot be in the cubin, since an include that the scan
does not see does not compile.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..build import CompileFailed, Unit
from .libnvrtc import Library

NAME: Final = "-name="
"""The prefix, among a unit's flags, of a name expression to instantiate."""

_INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_TRAILER: Final = struct.Struct("<Q8s")
_MAGIC: Final = b"rllmNVR1"
_ELF: Final = b"\x7fELF"
_CUDA_MACHINE: Final = 190


@dataclass(frozen=True, slots=True)
class NvrtcCompiler:
    """libnvrtc as a compiler of the build engine."""

    library: Library

    def identity(self) -> Mapping[str, str]:
        """Told without loading the library, so that a warm look-up stays cheap."""
        return {"nvrtc": self.library.identity}

    def dependencies(self, unit: Unit, scratch: Path | None = None) -> tuple[Path, ...]:
        """The headers reached from the source by `#include "..."`, all from the unit's own include directories."""
        return tuple(path for path, _ in _headers(unit).values())

    def compile(self, unit: Unit, output: Path, log: Path) -> None:
        """Write the cubin with its symbols; see `read`."""
        headers = {name: text for name, (_, text) in _headers(unit).items()}
        options = [f"--gpu-architecture={unit.arch}", *(flag for flag in unit.flags if not flag.startswith(NAME))]
        names = [flag.removeprefix(NAME) for flag in unit.flags if flag.startswith(NAME)]
        try:
            cubin, symbols, said = self.library.compile(
                unit.source.name, unit.source.read_text(), headers, options, names
            )
        except CompileFailed as failure:
            log.write_text(f"{failure.command}\n{failure.output}")
            raise
        log.write_text(f"nvrtc {' '.join(options)} {unit.source.name}\n{said}")
        trailer = json.dumps(symbols).encode()
        output.write_bytes(cubin + trailer + _TRAILER.pack(len(trailer), _MAGIC))


def read(path: Path) -> tuple[bytes, dict[str, str]]:
    """The cubin and the symbol of each name expression; raises ValueError if the file is not of this kind."""
    data = path.read_bytes()
    if len(data) < 64 or data[:4] != _ELF or int.from_bytes(data[18:20], "little") != _CUDA_MACHINE:
        raise ValueError(f"{path.name} is no cubin")
    length, magic = _TRAILER.unpack(data[-_TRAILER.size :])
    end = len(data) - _TRAILER.size
    if magic != _MAGIC or length > end:
        raise ValueError(f"{path.name} holds no symbols")
    cubin = data[: end - length]
    symbols: dict[str, str] = json.loads(data[end - length : end])
    missing = [name for name, symbol in symbols.items() if symbol.encode() + b"\0" not in cubin]
    if missing:
        raise ValueError(f"{path.name} has no kernel {missing[0]}")
    return cubin, symbols


def _headers(unit: Unit) -> dict[str, tuple[Path, str]]:
    """(file, text) of every header, by the name that it is included under."""
    found: dict[str, tuple[Path, str]] = {}
    waiting = _INCLUDE.findall(unit.source.read_text())
    while waiting:
        name = waiting.pop(0)
        if name in found:
            continue
        path = next((folder / name for folder in unit.include_dirs if (folder / name).is_file()), None)
        if path is None:  # perhaps within an #if that is not taken; otherwise the compiler names it
            continue
        text = path.read_text()
        found[name] = (path, text)
        waiting += _INCLUDE.findall(text)
    return found
