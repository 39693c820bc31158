"""Additions to source files that exist: each takes a text and gives the new one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from .request import AuthoringError

WIDTH = 120


def import_names(text: str, module: str, names: Iterable[str], where: str) -> str:
    """Add names to the file's `from module import ...`."""
    tree = ast.parse(text)
    found = next((n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == module and not n.level), None)
    if found is None or found.end_lineno is None:
        raise AuthoringError(f"{where} has no 'from {module} import ...' to add to; write the row by hand")
    wanted = sorted({alias.name for alias in found.names} | set(names), key=_sort_key)
    lines = text.splitlines()
    lines[found.lineno - 1 : found.end_lineno] = import_line(module, wanted).splitlines()
    return "\n".join(lines) + "\n"


def import_line(module: str, names: list[str]) -> str:
    """One import, in brackets where it is long."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _sort_key(name: str) -> tuple[int, str]:
    """Constants, classes, functions: as the linter has it."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def add_group(text: str, group: str) -> str:
    """Add a folder to `ops/__init__.py`: its import and `__all__`."""
    found = re.search(r"^from \. import (?:\((?P<many>[^)]*)\)|(?P<one>.+))$", text, re.MULTILINE)
    listed = re.search(r"^__all__ = \[(?P<names>[^\]]*)\]", text, re.MULTILINE)
    if found is None or listed is None:
        raise AuthoringError("rapid_llm/kernels/ops/__init__.py lists its groups in a way that is not understood")
    names = sorted({*re.findall(r"\w+", found["many"] or found["one"]), group})
    exported = "__all__ = [\n" + "".join(f'    "{n}",\n' for n in names) + "]"
    text = text[: listed.start()] + exported + text[listed.end() :]
    return text[: found.start()] + import_line(".", names) + text[found.end() :]


def append(text: str, block: str) -> str:
    """`block` after the end, two blank lines between."""
    return text.rstrip("\n") + "\n\n\n" + block.strip("\n") + "\n"


def append_close(text: str, block: str) -> str:
    """`block` after the end, one blank line between."""
    return text.rstrip("\n") + "\n\n" + block.strip("\n") + "\n"


def insert_after(text: str, line_start: str, block: str, where: str) -> str:
    """`block` below the only line that begins with `line_start`."""
    lines = text.splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith(line_start)]
    if len(at) != 1:
        raise AuthoringError(f"{where} has {len(at)} lines that begin with {line_start!r}, not one; add to it by hand")
    lines[at[0] + 1 : at[0] + 1] = block.rstrip("\n").splitlines()
    return "\n".join(lines) + "\n"


def indent(text: str, by: int = 4) -> str:
    """Every line but empty ones moved to the right."""
    return "".join(" " * by + line if line.strip() else line for line in text.splitlines(keepends=True))


def insert_sorted(text: str, pattern: str, name: str, block: str, end: str, where: str) -> str:
    """`block` among the statements that `pattern` finds, each from a line's start to `end`, by name."""
    found = list(re.finditer(pattern, text, re.MULTILINE))
    if not found:
        raise AuthoringError(f"{where} has nothing like {pattern!r} to stand beside; add {name} by hand")
    behind = next((match for match in found if match[1] > name), None)
    if behind is not None:
        at = text.rindex("\n", 0, behind.start() + 1) + 1 if behind.start() else 0
    else:
        at = text.index("\n", text.index(end, found[-1].start())) + 1
    return text[:at] + block + text[at:]
