"""How big a wheel or the extension is, against a budget, and what makes it so.

    python csrc/size.py dist/rapid_llm-*.whl [--budget 20]

Over the budget the exit status is 1. The largest members are listed, and of the extension the device code by source and
architecture: nvcc keeps it compressed, one container for each source, in the order in which they were linked.
"""

from __future__ import annotations

import argparse
import struct
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BUDGET_MB: Final = 20.0
"""Of the wheel with the extension: six times what it has."""

LIBRARY: Final = "_C.abi3.so"
_CONTAINER: Final = struct.pack("<I", 0xBA55ED50)
_ENTRY_SIZE: Final = 64


@dataclass(frozen=True, slots=True)
class Code:
    """Device code of one source for one architecture: `sm_90` or `compute_120`, and its bytes in the file."""

    source: str
    arch: str
    size: int


def device_code(library: bytes, sources: Sequence[str] = ()) -> list[Code]:
    """Every piece of device code in a library, largest first. sources: those that were linked, in order."""
    found: list[Code] = []
    at, count = library.find(_CONTAINER), 0
    while at >= 0:
        _, header, size = struct.unpack_from("<HHQ", library, at + 4)
        if header == 16 and at + header + size <= len(library):
            pieces = _entries(library, at + header, at + header + size)
            if pieces:
                name = sources[count] if count < len(sources) else f"source {count}"
                found += [Code(name, arch, length) for arch, length in pieces]
                count += 1
        at = library.find(_CONTAINER, at + 16)
    return sorted(found, key=lambda code: -code.size)


def _entries(library: bytes, at: int, end: int) -> list[tuple[str, int]]:
    pieces = []
    while at + _ENTRY_SIZE <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
        arch = struct.unpack_from("<I", library, at + 28)[0]
        if kind not in (1, 2) or header < _ENTRY_SIZE:
            break
        pieces.append((f"{'compute' if kind == 1 else 'sm'}_{arch}", header + size))
        at += header + size
    return pieces


def members(path: Path) -> tuple[list[tuple[str, int]], bytes]:
    """The members of a wheel with their compressed sizes, largest first, and the extension in it (b"" if none)."""
    if path.suffix != ".whl":
        return [(path.name, path.stat().st_size)], path.read_bytes()
    with zipfile.ZipFile(path) as wheel:
        sizes = sorted(((info.filename, info.compress_size) for info in wheel.infolist()), key=lambda m: -m[1])
        library = next((name for name, _ in sizes if name.endswith(LIBRARY)), None)
        return sizes, wheel.read(library) if library is not None else b""


def report(path: Path, top: int = 10) -> str:
    """The largest members, and the largest pieces of device code."""
    sizes, library = members(path)
    lines = [f"{path.name}: {path.stat().st_size / 1e6:.2f} MB"]
    lines += [f"  {size / 1e3:9.1f} kB  {name}" for name, size in sizes[:top]]
    root = Path(__file__).resolve().parent
    code = device_code(library, [p.relative_to(root).as_posix() for p in sorted(root.rglob("*.cu"))])
    if code:
        lines.append(f"device code: {sum(c.size for c in code) / 1e6:.2f} MB")
        lines += [f"  {c.size / 1e3:9.1f} kB  {c.arch:12} {c.source}" for c in code[:top]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python csrc/size.py", description="The size of a wheel or library.")
    parser.add_argument("file", type=Path, nargs="+", help="wheels, or the extension itself")
    parser.add_argument("--budget", type=float, default=BUDGET_MB, help="in MB (default: %(default)s)")
    options = parser.parse_args(arguments)
    over = False
    for path in options.file:
        print(report(path))
        if path.stat().st_size > options.budget * 1e6:
            over = True
            print(f"over the budget of {options.budget:g} MB", file=sys.stderr)
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
