"""The two compilers of this package: a C++ compiler for the CPU, and nvcc."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .arch import gencode
from .errors import CompileFailed
from .process import Done, programs, run, spell
from .remember import remembered
from .unit import Unit

if TYPE_CHECKING:
    from .toolchain import Toolchain

TIMEOUT_S: Final = 600.0
"""A compiler that runs longer is taken to hang."""

PROBE_S: Final = 30.0
"""The same for one that only states its version."""

NVCC_FLAGS: Final = ("-std=c++17", "-O3")
"""What CUDA units are compiled with unless they say otherwise; IEEE arithmetic, no fast math."""

_GCC_VARIABLES: Final = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH")
_NVCC_VARIABLES: Final = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")


@dataclass(frozen=True, slots=True)
class GxxCompiler:
    """g++ or clang++, as a command of one or more words (`ccache g++`)."""

    command: tuple[str, ...]
    timeout_s: float = TIMEOUT_S

    def identity(self) -> Mapping[str, str]:
        """The version that it prints, what it compiles for, and what changes what it does: arguments of its command
        (`g++ -ffast-math`) and environment variables. Which launcher is in front (ccache) does not."""
        arguments = self.command[len(programs(self.command)) :]
        given = {"arguments": spell(arguments)} if arguments else {}
        return {"c++": version_text(self.command), **given, **_set(_GCC_VARIABLES)}

    def dependencies(self, unit: Unit, scratch: Path | None = None) -> tuple[Path, ...]:
        """From `-M`: the preprocessor's own list, so includes by macro are in it."""
        flags = [flag for flag in unit.flags if flag != "-shared"]
        return make_rule([*self.command, *flags, *_includes(unit), "-M", str(unit.source)], scratch)

    def compile(self, unit: Unit, output: Path, log: Path) -> None:
        """One command for compiling and linking."""
        linked = map(str, unit.link_inputs)
        command = [*self.command, *unit.flags, *_includes(unit), str(unit.source), "-o", str(output), *linked]
        compile_with(command, output, log, self.timeout_s)


@dataclass(frozen=True, slots=True)
class NvccCompiler:
    """nvcc of a toolchain; the unit's architecture becomes its only `-gencode`."""

    toolchain: Toolchain
    timeout_s: float = TIMEOUT_S

    def identity(self) -> Mapping[str, str]:
        """nvcc's and the host compiler's versions, and the environment variables that nvcc adds to its command."""
        return {
            "nvcc": self.toolchain.nvcc_text,
            "c++": version_text(self.toolchain.host),
            **_set((*_NVCC_VARIABLES, *_GCC_VARIABLES)),
        }

    def dependencies(self, unit: Unit, scratch: Path | None = None) -> tuple[Path, ...]:
        """From `-M`, which covers the passes for host and device; the toolkit's own headers are its version's."""
        _check_shell([unit.source, *unit.include_dirs, *([scratch] if scratch is not None else [])])
        found = make_rule([*self._start(unit), *unit.flags, *_includes(unit), "-M", str(unit.source)], scratch)
        root = os.path.realpath(self.toolchain.root) + os.sep if self.toolchain.root is not None else None
        return tuple(path for path in found if root is None or not os.path.realpath(path).startswith(root))

    def compile(self, unit: Unit, output: Path, log: Path) -> None:
        """A shared library, or whatever the output's suffix (.cubin, .ptx, .fatbin) asks for."""
        _check_shell([output])
        kind = {".cubin": ["-cubin"], ".ptx": ["-ptx"], ".fatbin": ["-fatbin"], ".o": ["-c", "-Xcompiler", "-fPIC"]}
        form = kind.get(output.suffix, ["-shared", "-Xcompiler", "-fPIC"])
        command = [*self._start(unit), *form, *unit.flags, *_includes(unit), str(unit.source), "-o", str(output)]
        compile_with([*command, *map(str, unit.link_inputs)], output, log, self.timeout_s)

    def _start(self, unit: Unit) -> list[str]:
        if self.toolchain.nvcc is None:
            raise CompileFailed("", self.toolchain.reason())
        command = [str(self.toolchain.nvcc)]
        if self.toolchain.ccbin is not None:
            command += ["-ccbin", self.toolchain.ccbin]
        return command + list(gencode(unit.arch) if unit.arch else ())


def version_text(command: Sequence[str]) -> str:
    """What `command --version` prints first, and the machine it compiles for; kept until a file of it changes."""
    return remembered("version", command, lambda: _ask_version(command))[0]


def _ask_version(command: Sequence[str]) -> list[str]:
    shown = run([*command, "--version"], timeout_s=PROBE_S)
    if shown.status != 0:
        raise CompileFailed(spell([*command, "--version"]), shown.out + shown.err, shown.status)
    machine = run([*command, "-dumpmachine"], timeout_s=PROBE_S)
    first = next((line.strip() for line in shown.out.splitlines() if line.strip()), "no version")
    first = re.sub(r"^\S+ (?=\()", "", first)  # gcc repeats the name it was called by: c++, g++, g++-12
    return [f"{first} [{machine.out.strip() if machine.status == 0 else 'native'}]"]


def _check_shell(paths: Sequence[Path]) -> None:
    """nvcc hands its passes to a shell without quoting: a `$` would vanish from a path, and the file not be found."""
    for path in paths:
        found = re.search(r"[$`'\"\\]", str(path))
        if found:
            fix = "install the package, or set RAPID_LLM_CACHE_DIR, where no path has one"
            raise CompileFailed("", "", first=f"nvcc cannot use {path}: it loses the {found[0]}; {fix}")


def make_rule(command: Sequence[str], scratch: Path | None = None) -> tuple[Path, ...]:
    """The prerequisites of the rule that a compiler prints for make, in its order."""
    done = run(command, timeout_s=TIMEOUT_S, env={"TMPDIR": str(scratch)} if scratch is not None else None)
    if done.status != 0:
        raise CompileFailed(spell(command), done.err + done.out, done.status)
    return parse_rule(done.out)


def parse_rule(text: str) -> tuple[Path, ...]:
    """The files after `target:`; spaces and dollars in names are escaped as make has it."""
    _, _, rest = text.replace("\\\r\n", " ").replace("\\\n", " ").partition(": ")
    words = re.findall(r"(?:\\[ #\\]|[^\s])+", rest.partition("\n")[0])
    return tuple(Path(re.sub(r"\\([ #\\])", r"\1", word).replace("$$", "$")) for word in words)


def compile_with(command: Sequence[str], output: Path, log: Path, timeout_s: float) -> None:
    """Run a compile; its temporary files go beside its output, where they are swept with it."""
    scratch = output.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    done = run(command, timeout_s=timeout_s, env={"TMPDIR": str(scratch)})
    _write_log(log, command, done)
    if done.status != 0:
        raise CompileFailed(spell(command), done.out + done.err, done.status)
    if not output.is_file():
        raise CompileFailed(spell(command), f"{done.out}{done.err}\nerror: {output.name} was not written")


def _write_log(log: Path, command: Sequence[str], done: Done) -> None:
    text = f"{spell(command)}\n{done.out}{done.err}"
    log.write_text(text, encoding="utf-8", errors="backslashreplace")  # names may hold bytes that are no text


def _includes(unit: Unit) -> list[str]:
    own = [word for folder in unit.include_dirs for word in ("-I", str(folder))]
    return own + [word for folder in unit.system_dirs for word in ("-isystem", str(folder))]


def _set(names: Sequence[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if os.environ.get(name)}
