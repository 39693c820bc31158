"""What a scaffold will write: new files and edits, known as a whole before the first byte is written."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Final

from .request import AuthoringError

_TEMPLATES: Final = Path(__file__).parent / "templates"


@dataclass(slots=True)
class Plan:
    """files: new ones, by path. edits: existing ones with their whole new text. commands: what to type next."""

    root: Path
    files: dict[Path, str] = field(default_factory=dict)
    edits: dict[Path, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    def add(self, path: str, text: str) -> None:
        """A new file, its path relative to the root."""
        self.files[self.root / path] = text

    def add_absent(self, path: str, text: str) -> None:
        """A new file that another kernel may have brought already."""
        if not (self.root / path).exists():
            self.add(path, text)

    def edit(self, path: str, text: str) -> None:
        """The new text of a file that exists."""
        self.edits[self.root / path] = text

    def text(self, path: str) -> str:
        """The text that `path` has so far under this plan."""
        full = self.root / path
        return self.edits[full] if full in self.edits else full.read_text()

    def check(self) -> None:
        """Raise `AuthoringError` if a new file exists, before anything is written."""
        there = [path for path in self.files if path.exists() or path.is_symlink()]
        if there:
            shown = ", ".join(os.path.relpath(path, self.root) for path in there)
            raise AuthoringError(
                f"nothing was written: {shown} {'exists' if len(there) == 1 else 'exist'} in {self.root}; "
                "choose another op, --variant NAME or --into DIR"
            )

    def write(self) -> None:
        """Write all of it. New files are created exclusively; whatever fails takes the new files away again."""
        self.check()
        done: list[Path] = []
        try:
            for path, text in self.files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("x") as file:
                    done.append(path)
                    file.write(text)
        except OSError:
            for path in done:
                path.unlink()
            raise
        for path, text in self.edits.items():
            path.write_text(text)


def fill(name: str, values: dict[str, str]) -> str:
    """A template with its values; a name that is missing is a `KeyError`."""
    return Template((_TEMPLATES / f"{name}.tmpl").read_text()).substitute(values)
