"""Where the kernels of a checkout, or of a package that brings its own, keep their sources, tests and benchmarks."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rapid_llm.kernels.registry import KernelSpec, OpSpec, ops, rows
from rapid_llm.kernels.registry.probes import find_top

from .cuda_rules import SUFFIXES
from .request import AuthoringError, is_checkout

_SKIPPED: Final = ("__pycache__", "build", "dist", "node_modules")
_KERNELS: Final = ("rapid_llm/kernels/ops", "rapid_llm/kernels/backend", "rapid_llm/kernels/csrc", "csrc", "setup.py")


@dataclass(frozen=True, slots=True)
class Project:
    """root: the folder with pyproject.toml. whole: all of it is asked about, so what is missing is a finding."""

    root: Path
    in_checkout: bool
    whole: bool

    @property
    def tests(self) -> Path:
        """The folder of the rows' tests."""
        return self.root / "tests" / "kernels" if self.in_checkout else self.root / "tests"

    @property
    def benchmarks(self) -> Path:
        """The folder of one benchmark an op."""
        return self.root / "benchmarks" / "kernels" if self.in_checkout else self.root / "benchmarks"

    def sources(self, paths: list[Path]) -> list[Path]:
        """The kernels' sources among `paths`; of a checkout's root only the folders that hold kernels."""
        starts = [
            start
            for path in paths
            for start in ([self.root / k for k in _KERNELS] if self.in_checkout and path == self.root else [path])
        ]
        return sorted({file for start in starts if start.exists() for file in self._below(start)})

    def _below(self, start: Path) -> Iterator[Path]:
        if start.is_file():
            yield start
            return
        for file in start.rglob("*"):
            parts = file.relative_to(start).parts
            if any(part in _SKIPPED or part.startswith(".") or part.endswith(".egg-info") for part in parts):
                continue
            apart = not self.in_checkout and parts[0] in ("tests", "benchmarks")
            if file.suffix in (".py", *SUFFIXES) and file.is_file() and not apart:
                yield file

    def declared(self) -> list[tuple[OpSpec, list[KernelSpec]]]:
        """Every op with a row of this project, and those rows."""
        found = []
        for op in ops():
            mine = [row for row in rows(op.id) if self._is_mine(row)]
            if mine:
                found.append((op, mine))
        return found

    def _is_mine(self, row: KernelSpec) -> bool:
        if self.in_checkout:
            return row.target.startswith("rapid_llm.")
        file = module_file(row.target.partition(":")[0])
        return file is not None and file.resolve().is_relative_to(self.root)


def project(paths: list[Path]) -> Project:
    """The project that all `paths` belong to; raises `AuthoringError` where there is none or there are several."""
    roots = {_root(path) for path in paths}
    if len(roots) != 1:
        raise AuthoringError(f"the paths belong to {len(roots)} projects: {', '.join(map(str, sorted(roots)))}")
    (root,) = roots
    return Project(root, is_checkout(root), any(path == root for path in paths))


def _root(path: Path) -> Path:
    if not path.exists():
        raise AuthoringError(f"{path} does not exist")
    for folder in (path, *path.parents):
        if (folder / "pyproject.toml").is_file():
            return folder
    raise AuthoringError(f"{path} is in no project: no folder above it has a pyproject.toml")


def module_file(name: str) -> Path | None:
    """Where a module's source lies; nothing is imported but what is imported already."""
    if name in sys.modules:
        origin = getattr(sys.modules[name], "__file__", None)
        return Path(origin) if origin else None
    path: list[str] | None = None
    spec = None
    for i, _ in enumerate(parts := name.split(".")):
        full = ".".join(parts[: i + 1])
        spec = find_top(full) if path is None else importlib.machinery.PathFinder.find_spec(full, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec is not None and spec.origin else None
