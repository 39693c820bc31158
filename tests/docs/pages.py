"""The steps of a guide: fenced blocks, and what a comment in front of each says of it.

In front of a block may stand, each in a line of its own:

    <!-- writes: PATH -->         the reader saves the block under PATH
    <!-- appends: PATH -->        the reader puts the block at the end of that file
    <!-- replaces: PATH -->       its functions and imports take the place of those of the same name in that file
    <!-- quotes: PATH -->         the block stands in that file of this repository; `...` is what was left out
    <!-- needs: nvcc, gpu -->     the block runs only where these are
    <!-- fails: 1 -->             the block's last command ends with this status
    <!-- foreign: CUDA -->        the message in the block is not this package's own

A `console` block is run: `$ ` begins a command, `> ` continues it, and the lines after it are in its output, in this
order. `...` stands for whatever lies between.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
GUIDES: Final = tuple(sorted(DOCS.glob("guide-*.md")))

_NOTE: Final = re.compile(r"^<!-- (writes|appends|replaces|quotes|needs|fails|foreign): (.+) -->$")
_OPEN: Final = re.compile(r"^```(\w*)$")


@dataclass(frozen=True, slots=True)
class Command:
    """One command and the pieces of its output, in order."""

    text: str
    output: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: its page and line, its language, what the comments in front of it say, its text."""

    page: str
    line: int
    language: str
    text: str
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(word.strip() for word in self.notes.get("needs", "").split(",") if word.strip())

    @property
    def status(self) -> int:
        return int(self.notes.get("fails", "0"))

    def commands(self) -> list[Command]:
        """What a `console` block runs; raises ValueError where its first line is no command."""
        found: list[tuple[list[str], list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append(([line[2:]], []))
            elif not found:
                raise ValueError(f"{self.where}: a console block begins with '$ ', not with {line!r}")
            elif line.startswith("> ") and not found[-1][1]:
                found[-1][0].append(line[2:])
            else:
                found[-1][1].append(line)
        return [Command("\n".join(text), _pieces(output)) for text, output in found]


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page, with its notes."""
    found: list[Block] = []
    notes: dict[str, str] = {}
    inside: list[str] | None = None
    language, start = "", 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if inside is not None:
            if line == "```":
                found.append(Block(page.name, start, language, "\n".join(inside) + "\n", notes))
                notes, inside = {}, None
            else:
                inside.append(line)
        elif opened := _OPEN.match(line):
            language, start, inside = opened[1], number, []
        elif note := _NOTE.match(line):
            notes[note[1]] = note[2]
        elif line.strip() and notes:
            raise ValueError(f"{page.name}:{number}: the comment in front belongs to no block")
    return found


def missing_piece(pieces: tuple[str, ...], output: str) -> str | None:
    """The first piece that does not follow the ones before it in `output`, or None. Runs of blanks are one blank."""
    rest = _plain(output)
    for piece in pieces:
        _, found, after = rest.partition(piece)
        if not found:
            return piece
        rest = after
    return None


def _pieces(lines: list[str]) -> tuple[str, ...]:
    return tuple(part for line in lines for text in line.split("...") if (part := _plain(text)))


def _plain(text: str) -> str:
    return " ".join(text.split())
