"""`check`: every convention of kernels that can be read off sources and declarations, over a project or parts of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import rapid_llm.kernels  # noqa: F401 - declares the ops
from rapid_llm.kernels.registry import KernelSpec, plugins

from . import cuda_rules, python_rules, row_rules
from .findings import Finding, settle
from .project import Project, project


@dataclass(frozen=True, slots=True)
class Checked:
    """files: how many sources were read. rows: how many declared rows were looked at. notes: what was not looked at."""

    root: Path
    files: int
    rows: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()


def check(paths: list[Path]) -> Checked:
    """Look at the sources below `paths`, and at the declarations if a whole project is among them: of parts, only at
    whether the functions of rows fit their ops.

    Raises `AuthoringError` for a path that does not exist or is in no project.
    """
    plugins.scan()
    paths = [path.resolve() for path in paths]
    where = project(paths)
    texts = {file: file.read_text(errors="replace") for file in where.sources(paths)}
    found = [finding for file, text in texts.items() for finding in _source(file, text)]
    rows = [row for _, listed in where.declared() for row in listed] if where.whole else []
    declared = list(row_rules.signatures(where, None if where.whole else texts))
    if where.whole:
        declared += row_rules.check(where)
        declared += row_rules.plugins_out(where)
    for path in {finding.path for finding in declared} - set(texts):
        texts[path] = path.read_text(errors="replace") if path.is_file() else ""
    found += declared
    return Checked(where.root, len(texts), len(rows), tuple(settle(found, texts, row_rules.ALL)), _notes(where, rows))


def _source(file: Path, text: str) -> Iterator[Finding]:
    if file.suffix == ".py":
        try:
            yield from python_rules.check(file, text)
        except SyntaxError as error:
            yield Finding(file, error.lineno or 1, "waiver", f"it does not parse: {error.msg}", "correct it")
    else:
        yield from cuda_rules.check(file, text)


def _notes(where: Project, rows: list[KernelSpec]) -> tuple[str, ...]:
    if where.whole and not where.in_checkout and not rows:
        return ("no row of this package is registered, so only sources were checked; see pip install -e .",)
    return ()
