"""Conventions of CUDA sources that can be read off the text: [J2] of the kernel system."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .findings import Finding

RULES: Final = ("ascii", "int64", "stream", "sync", "launch-check", "launcher", "why-not-triton")
SUFFIXES: Final = (".cu", ".cuh", ".h", ".cpp", ".cc")

_QUIET: Final = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
_NARROW: Final = re.compile(
    r"\b(?:unsigned int|unsigned|int|int32_t|uint32_t|size_t)\s+\w+\s*=\s*[^;{]*\bnumel\s*\(\s*\)"
)
_SYNC: Final = re.compile(r"\bcuda(?:Device|Thread|Stream)Synchronize\b|\bcudaDeviceReset\b|\bcudaStreamLegacy\b")
_CHECK: Final = re.compile(r"\bcheck_launch\s*\(|\bC10_CUDA_KERNEL_LAUNCH_CHECK\s*\(|\bcudaGetLastError\s*\(")
_DOOR: Final = re.compile(r"\bRAPID_LLM_FUNCTION\s*\(\s*(?:thin::)?(\w+)\s*\)")
_REASON: Final = re.compile(r"\b(?:Triton|PyTorch)\b")
_HEAD: Final = 12
"""Lines from the top in which a source says why it is not Triton."""


def check(path: Path, text: str) -> Iterator[Finding]:
    """Every finding of one source file."""
    bare = quiet(text)
    yield from _ascii(path, text)
    yield from _patterns(path, bare)
    yield from _launches(path, bare)
    if _DOOR.search(bare) and path.suffix in (".cu", ".cpp"):
        yield from _launchers(path, bare)
        yield from _why(path, text)


def quiet(text: str) -> str:
    """The text with comments and quoted texts blanked; every line keeps its place."""
    return _QUIET.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _ascii(path: Path, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.isascii():
            bad = next(letter for letter in line if not letter.isascii())
            yield Finding(
                path, number, "ascii", f"{bad!r} is not ASCII", "compilers of another locale refuse it: spell it out"
            )


def _patterns(path: Path, bare: str) -> Iterator[Finding]:
    for found in _NARROW.finditer(bare):
        fix = "numel passes 2^31: use int64_t"
        yield Finding(
            path, _line(bare, found.start()), "int64", f"{found[0].split('=')[0].strip()} narrows numel()", fix
        )
    for found in _SYNC.finditer(bare):
        fix = "order work by the current stream; a launcher never waits for the device"
        yield Finding(path, _line(bare, found.start()), "sync", f"{found[0]} in a kernel's source", fix)


def _launches(path: Path, bare: str) -> Iterator[Finding]:
    checks = [found.start() for found in _CHECK.finditer(bare)]
    for found in re.finditer(r"<<<", bare):
        end = bare.find(">>>", found.end())
        if end < 0:
            continue
        line = _line(bare, found.start())
        given = _split(bare[found.end() : end])
        if len(given) < 4 or given[3] in ("0", "nullptr", "NULL"):
            fix = "give shared memory and launch.stream() too: the default stream breaks graphs and order"
            yield Finding(path, line, "stream", "a launch on the default stream", fix)
        if not any(at > end for at in checks):
            yield Finding(
                path, line, "launch-check", "no check after this launch", "end the launcher with check_launch(op)"
            )


def _launchers(path: Path, bare: str) -> Iterator[Finding]:
    """The functions of the door: out first, scalars double."""
    for name in _DOOR.findall(bare):
        where, text = _definition(path, bare, name)
        if text is None:
            continue
        found = re.search(rf"\bvoid\s+(?:\w+::)?{name}\s*\(([^)]*)\)", text)
        if found is None:
            continue
        line = _line(text, found.start())
        given = [" ".join(part.split()) for part in found[1].split(",") if part.strip()]
        written = [part for part in given if re.match(r"Tensor\s*&", part)]
        if not written or (any(part.endswith("out") for part in written) and given[0] != written[0]):
            fix = f"void {name}(Tensor& out, const Tensor& input, double factor): what is returned comes first"
            yield Finding(where, line, "launcher", f"{name} does not begin with the tensor that it writes", fix)
        for part in given:
            if re.match(r"(?:const\s+)?float\b(?!\s*\*)", part):
                fix = "take double and narrow inside: a schema's float is a double"
                yield Finding(where, line, "launcher", f"{name} takes '{part}'", fix)


def _definition(path: Path, bare: str, name: str) -> tuple[Path, str | None]:
    """The file beside the door that defines the launcher, and its text."""
    pattern = re.compile(rf"\bvoid\s+(?:\w+::)?{name}\s*\(")
    if pattern.search(bare):
        return path, bare
    for header in sorted(path.parent.glob("*.h")):
        text = quiet(header.read_text(errors="replace"))
        if pattern.search(text):
            return header, text
    return path, None


def _why(path: Path, text: str) -> Iterator[Finding]:
    head = [line for line in text.splitlines()[:_HEAD] if line.lstrip().startswith("//")]
    if not _REASON.search("\n".join(head)):
        fix = "say in the comment at its top why the kernel isn't Triton (// ... Why not Triton: ...)"
        yield Finding(path, 1, "why-not-triton", "the source does not say why it isn't Triton", fix)


def _split(text: str) -> list[str]:
    """Split a launch's configuration at the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]
