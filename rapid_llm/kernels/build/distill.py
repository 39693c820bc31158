"""Of a compiler's output, the line that matters: file, line number and first error; and what to do about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_GCC: Final = re.compile(r"^(?P<where>[^\s:][^:]*:\d+)(?::\d+)?: (?:fatal )?error: (?P<what>.*)$")
_NVCC: Final = re.compile(
    r"^(?P<file>[^\s(][^()]*)\((?P<line>\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (?P<what>.*)$"
)
_OTHERS: Final = (
    re.compile(r"undefined reference to"),
    re.compile(r"\bld(?:\.\w+)?: (?:error: )?(?:cannot find|.*: undefined|.*multiple definition|.*relocation)"),
    re.compile(r"^ptxas .*; error"),
    re.compile(r"^(?:nvlink|ptxas|nvcc|cicc|fatbinary) (?:error|fatal)"),
    re.compile(r"\bfatal\b.*:"),
    re.compile(r"\berror\b", re.IGNORECASE),
)
_MEMORY: Final = re.compile(
    r"Killed signal|virtual memory exhausted|out of memory|cannot allocate memory|std::bad_alloc|died due to signal 9",
    re.IGNORECASE,
)
_SPACE: Final = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Distilled:
    """first: the first error in one line, `file:line: message` where there is a place. disk_full: nothing is wrong with
    the source; the compiler could not write."""

    first: str
    disk_full: bool = False


def distill(text: str, status: int | None = None) -> Distilled:
    """What to tell of `text`, the output of a compiler that ended with `status`."""
    if _SPACE.search(text):
        return Distilled(f"the disk is full: {_line(_SPACE, text)}", disk_full=True)
    if status == -9 or (_MEMORY.search(text) and not _place(text)):
        said = _line(_MEMORY, text)
        return Distilled(
            "the compiler was killed, most likely out of memory" + (f" ({said})" if said else "") + "; lower MAX_JOBS"
        )
    placed = _place(text)
    if placed:
        return Distilled(placed)
    for pattern in _OTHERS:
        found = _line(pattern, text)
        if found:
            return Distilled(found)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines:
        return Distilled(lines[-1][:500])
    ended = "" if status is None else f" (exit status {status})"
    return Distilled(f"the compiler failed and said nothing{ended}")


def _place(text: str) -> str:
    for line in text.splitlines():
        gcc = _GCC.match(line)
        if gcc:
            return f"{gcc['where']}: error: {gcc['what']}"[:500]
        nvcc = _NVCC.match(line)
        if nvcc:
            return f"{nvcc['file']}:{nvcc['line']}: error: {nvcc['what']}"[:500]
    return ""


def _line(pattern: re.Pattern[str], text: str) -> str:
    return next((line.strip()[:500] for line in text.splitlines() if pattern.search(line)), "")
