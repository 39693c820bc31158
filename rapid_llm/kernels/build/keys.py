"""What a unit's key is made of.

The key has two parts. `base` covers all that is known without a compiler: the unit itself, its source, the files it
links, and the compiler's identity. The second part covers the headers: their names, relative to the source's folder or
an include directory, and their contents. The list of headers comes from the compiler and is kept beside the artifact,
so that a look-up only reads files. A header that could come into being in front of a listed one (a file of its name in
a directory searched earlier) is listed as absent. Headers of the system, of Python and of torch are left out: the
compiler's identity and the unit's facts stand for them.
"""

from __future__ import annotations

import importlib.machinery
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from .digests import file_digest, text_digest
from .unit import Compiler, Unit

_PACKAGE: Final = os.path.realpath(Path(__file__).parents[2])
ABSENT: Final = "absent"


@dataclass(frozen=True, slots=True)
class Headers:
    """The own headers of a unit, each as (name, digest); the digest `absent` says that the file must not exist."""

    entries: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        return text_digest(*(part for entry in self.entries if entry[1] != ABSENT for part in entry), length=16)

    def hold(self, unit: Unit) -> bool:
        """Whether every header still has the content listed here. A list that names what cannot be does not hold."""
        try:
            return all(_now(_locate(name, unit)) == digest for name, digest in self.entries)
        except (ValueError, IndexError):  # of a record that was altered: no such include directory, no such path
            return False


def base_key(unit: Unit, compiler: Compiler) -> str:
    """The part of the key that needs no list of headers."""
    parts = ["rapid_llm build 1", unit.path, unit.name, unit.output, unit.arch, unit.source.name]
    parts += [file_digest(unit.source), str(len(unit.include_dirs))]
    for group in (unit.flags, _pairs(unit.facts.items()), _pairs(compiler.identity().items())):
        parts += [str(len(group)), *group]
    for linked in unit.link_inputs:
        parts += [linked.name, file_digest(linked)]
    return text_digest(*parts, length=24)


def headers(unit: Unit, compiler: Compiler, scratch: Path | None = None) -> Headers:
    """The unit's own headers as the compiler lists them now."""
    source = os.path.realpath(unit.source)
    paths = {os.path.realpath(path) for path in compiler.dependencies(unit, scratch)} - {source}
    own = sorted(path for path in paths if not _foreign(path, unit))
    named = [(_name(path, unit), path) for path in own]
    present = [(name, file_digest(Path(path))) for name, path in named]
    absent = sorted({spot for name, _ in named for spot in _earlier(name, unit)} - {name for name, _ in named})
    gone = [(name, ABSENT) for name in absent if not os.path.exists(_locate(name, unit))]
    return Headers((*present, *gone))


def full_key(base: str, found: Headers) -> str:
    """Both parts as one text."""
    return f"{base}-{found.digest}"


def in_package(path: str | Path) -> str | None:
    """The path relative to this package, for files that belong to it."""
    real = os.path.realpath(path)
    return os.path.relpath(real, _PACKAGE) if _below(real, _PACKAGE) else None


def package_file(name: str) -> Path:
    """The file that `in_package` named."""
    return Path(_PACKAGE, name)


def locate(name: str, unit: Unit) -> Path:
    """Where a header named in `Headers` lies."""
    return Path(_locate(name, unit))


def _pairs(items: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in sorted(items))


def _now(path: str) -> str:
    try:
        return file_digest(Path(path))
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    except OSError as error:  # differs from any digest, so the compiler gets to say what it thinks of it
        return f"unreadable: {error}"


def _name(path: str, unit: Unit) -> str:
    roots = [(os.path.realpath(folder), i) for i, folder in enumerate(unit.include_dirs)]
    above = [(len(root), root, i) for root, i in roots if _below(path, root)]
    if above:  # the innermost: of nested include directories it is the one that the include was found through
        _, root, i = max(above)
        return f"{i}:{os.path.relpath(path, root)}"
    return f"source:{os.path.relpath(path, os.path.dirname(os.path.realpath(unit.source)))}"


def _locate(name: str, unit: Unit) -> str:
    root, _, rest = name.partition(":")
    folder = os.path.dirname(os.path.realpath(unit.source)) if root == "source" else unit.include_dirs[int(root)]
    return os.path.normpath(os.path.join(folder, rest))


def _earlier(name: str, unit: Unit) -> list[str]:
    """Names under which a new file would be found before `name`."""
    root, _, rest = name.partition(":")
    if root == "source":
        return []
    return [f"source:{rest}", *(f"{i}:{rest}" for i in range(int(root)))]


def _below(path: str, root: str) -> bool:
    return path.startswith(root.rstrip(os.sep) + os.sep)


def _foreign(path: str, unit: Unit) -> bool:
    own = (_PACKAGE, os.path.dirname(os.path.realpath(unit.source)), *map(os.path.realpath, unit.include_dirs))
    if any(_below(path, root) for root in own):
        return False
    return any(_below(path, root) for root in (*map(os.path.realpath, unit.system_dirs), *_system_roots()))


@cache
def _system_roots() -> tuple[str, ...]:
    """Folders whose headers change only with a version that is in the key. What is in none of them counts by content,
    which is always right: /usr as a whole is not here, because people keep projects and packages below it, nor is
    /usr/local/include, where they install libraries by hand; only the C++ library of a compiler that is there."""
    roots = ["/usr/include", "/usr/local/include/c++", "/usr/lib/gcc", "/usr/lib/clang"]
    roots += [sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
    for package in ("torch", "nvidia"):
        found = importlib.machinery.PathFinder.find_spec(package)
        roots += list(found.submodule_search_locations or []) if found is not None else []
    return tuple(os.path.realpath(root) for root in roots)
