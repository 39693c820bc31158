"""What is to be built, what builds it, and what comes out: the three nouns of the build engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

PLAIN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


@dataclass(frozen=True, slots=True)
class Unit:
    """One artifact to be. Everything here enters its key; no absolute path does, so that a cache may be moved.

    path: the way it is built (`cpp`, `jit`, `nvrtc`, `aot`), a folder in the store. output: the file's name inside the
    artifact's folder. flags: as given to the compiler. include_dirs: headers below them enter by content.
    system_dirs: headers below them (Python's, a library's) enter by the versions stated in `facts`. link_inputs: files
    given to the linker, by content. arch: `sm_90`, or the CPU's level of vector extensions. facts: whatever else shapes
    the result: torch, Python tag, ABI, CUDA.
    """

    path: str
    name: str
    source: Path
    output: str
    flags: tuple[str, ...]
    include_dirs: tuple[Path, ...] = ()
    link_inputs: tuple[Path, ...] = ()
    arch: str = ""
    facts: Mapping[str, str] = field(default_factory=dict, hash=False)
    system_dirs: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        for label in ("path", "name", "output"):
            value = getattr(self, label)
            if not PLAIN.fullmatch(value):
                raise ValueError(f"Unit.{label}={value!r}: use a plain file name of letters, digits and _ . + -")

    def __str__(self) -> str:
        return f"{self.path}/{self.name}"


class Compiler(Protocol):
    """How a unit becomes a file."""

    def identity(self) -> Mapping[str, str]:
        """What distinguishes this compiler's output: version text, never the spelling of a path."""

    def dependencies(self, unit: Unit, scratch: Path | None = None) -> tuple[Path, ...]:
        """Every header that the unit reads, as the compiler itself reports; raises `CompileFailed`.

        scratch: an existing folder for what the compiler writes on the way; None is the temporary directory."""

    def compile(self, unit: Unit, output: Path, log: Path) -> None:
        """Write `output`, and what was said to `log`; raises `CompileFailed` or `BuildTimeout`."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A built file in the store. seconds: how long it took to build, whenever that was. layer: where it was found."""

    path: Path
    key: str
    seconds: float
    cached: bool
    layer: str
