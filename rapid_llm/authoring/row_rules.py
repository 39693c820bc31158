"""What every declared row and op has beside its source: tests, a benchmark, oracle and cases, a place in the docs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Container, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

from rapid_llm.kernels.registry import KernelSpec, OpSpec, RegistrationError, get_op, plugins
from rapid_llm.kernels.registry.signature import check_static

from . import cuda_rules, python_rules
from .findings import Finding
from .project import Project, module_file

RULES: Final = (
    *("row-tests", "benchmark", "op-spec", "signature", "plugin", "group", "sm-gate", "prepare", "docs", "sorted"),
)
_COMPILED: Final = ("jit", "nvrtc", "aot")
_LISTS: Final = {
    "m.def": r"m\.def\(\s*\"(\w+)",
    "m.impl": r"m\.impl\(\s*\"(\w+)",
    "methods": r"^ +RAPID_LLM_THIN\((\w+)",
}
"""The lists of csrc/common_extension.cc, and where each has its names."""

_NAMED, _CALLED = re.compile(r"\((/[^()\n]+):(\d+)\)"), re.compile(r'File "([^"\n]+)", line (\d+)')
_REASON: Final = re.compile(r"\b(?:Triton|PyTorch)\b")


def check(project: Project) -> Iterator[Finding]:
    """Every finding about what the project declares."""
    declared = project.declared()
    tests = _test_files(project)
    for op, rows in declared:
        where = _Places(project, op)
        own = get_op(op.id) is op and any(row.is_native for row in rows)
        if own:
            yield from _op(project, op, where)
        for row in rows:
            yield from _row(project, op, row, where, tests)
        if not (project.benchmarks / f"{op.function}.py").is_file():
            path, line = where.op() if own else where.row(rows[0])
            name = f"{project.benchmarks.relative_to(project.root)}/{op.function}.py"
            yield Finding(
                path, line, "benchmark", f"{op.id} has no benchmark", f"write {name}: its arms are the op's rows"
            )
    if project.in_checkout:
        yield from _docs(project)
        yield from _sorted(project)


def signatures(project: Project, files: Container[Path] | None = None) -> Iterator[Finding]:
    """Rows whose function is not what their op's schema demands; only those of which `files` hold the one or the other.

    A foreign package of which that is so does not come as far as a row: it is a plugin that failed to load.
    """
    for op, rows in project.declared():
        schema = _Places(project, op).op()
        for row in rows:
            target = module_file(row.target.partition(":")[0])
            if files is not None and target not in files and schema[0] not in files:
                continue
            try:
                check_static(row, op)
            except RegistrationError as error:
                path, line = error.place or (str(target or schema[0]), 1)
                own = schema[0].is_file() and f'id="{op.id}"' in schema[0].read_text()
                where = f", or mend the schema at {schema[0]}:{schema[1]}" if own else ""
                yield Finding(Path(path), line, "signature", str(error), f"give it the op's parameters{where}")


def plugins_out(project: Project) -> Iterator[Finding]:
    """Entry points of the project's package that failed to load, so that none of its rows is looked at."""
    for plugin in plugins.plugins():
        module = module_file(plugin.value.partition("[")[0].strip().partition(":")[0])
        if plugin.failure is None or module is None or not module.resolve().is_relative_to(project.root):
            continue
        path, line = _place(plugin.failure, project.root) or (module, 1)
        text = f"the plugin {plugin.name} is out: {plugin.failure.strip().splitlines()[-1]}"
        yield Finding(path, line, "plugin", text, "correct it: rapid_llm loads none of its rows until then")


def _place(failure: str, root: Path) -> tuple[Path, int] | None:
    """What a failure is about below `root`: the place that its message names, else the last one of its traceback."""
    for pattern in (_NAMED, _CALLED):
        mine = [(Path(file), int(line)) for file, line in pattern.findall(failure) if Path(file).is_relative_to(root)]
        if mine:
            return mine[-1]
    return None


class _Places:
    """Where an op and its rows are declared: the line of the text that names them."""

    def __init__(self, project: Project, op: OpSpec) -> None:
        self.root = project.root
        self.op_id = op.id
        if project.in_checkout:
            self.files = [project.root / "rapid_llm" / "kernels" / "ops" / op.group / "__init__.py"]
        else:
            self.files = sorted(project.root.glob("*/*.py"))

    def op(self) -> tuple[Path, int]:
        """The line on which the declaration of the op begins."""
        path, line = self._find(f'id="{self.op_id}"')
        above = path.read_text().splitlines()[: line - 1] if path.is_file() else []
        return path, line - 1 if above and above[-1].rstrip().endswith("OpSpec(") else line

    def row(self, row: KernelSpec) -> tuple[Path, int]:
        start = f"{row.backend}/{row.op}"
        return self._find(f'name="{row.name}"', f'"{start}.{{', f'"{start}', row.target)

    def _find(self, *texts: str) -> tuple[Path, int]:
        for text in texts:
            for file in self.files:
                for number, line in enumerate(file.read_text().splitlines(), 1) if file.is_file() else ():
                    if text in line:
                        return file, number
        return (self.files or [self.root / "pyproject.toml"])[0], 1


def _op(project: Project, op: OpSpec, where: _Places) -> Iterator[Finding]:
    path, line = where.op()
    if not op.doc.strip():
        yield Finding(
            path, line, "op-spec", f"{op.id} has no doc", "say what it computes: rows and tests are written to it"
        )
    for field in ("oracle", "cases", "bound", "work"):
        target = getattr(op, field)
        if not _defines(target):
            text = f"{op.id}: {field}={target!r} is nowhere defined"
            yield Finding(path, line, "op-spec", text, f"write {target.replace(':', '.')}")
    if project.in_checkout:
        folder = project.root / "rapid_llm" / "kernels" / "ops" / op.group
        if not (folder / "__init__.py").is_file():
            yield Finding(
                path, line, "group", f"{op.id} is of the group {op.group}, a folder that is not there", f"make {folder}"
            )


def _row(project: Project, op: OpSpec, row: KernelSpec, where: _Places, tests: dict[Path, str]) -> Iterator[Finding]:
    path, line = where.row(row)
    yield from _row_source(project, op, row)
    if row.backend in _COMPILED:
        if row.devices != ("cuda",) or not row.capability:
            fix = 'state devices=("cuda",) and capability=((80, None),) or narrower: SM gating comes before any build'
            yield Finding(path, line, "sm-gate", f"{row.name} does not say which SM versions it runs on", fix)
        if row.backend != "aot" and row.graph_safe and row.prepare is None:
            fix = "name prepare=, or graph_safe=False: a capture must not meet a first compile"
            yield Finding(path, line, "prepare", f"{row.name} is graph_safe and compiles at its first call", fix)
    kind = row.backend if project.in_checkout else row.target.partition(":")[0].rpartition("_")[2]
    names = (op.function, op.id)
    tested = any(
        f"{row.backend}/{row.op}" in text or (kind in file.stem and any(name in text for name in names))
        for file, text in tests.items()
    )
    if not tested:
        fix = f"write {project.tests.relative_to(project.root)}/test_{op.function}_{kind}.py"
        yield Finding(path, line, "row-tests", f"{row.name} has no test of its own", fix)


def _row_source(project: Project, op: OpSpec, row: KernelSpec) -> Iterator[Finding]:
    """The module of the row: how thin it is, and whether somebody says why it isn't Triton."""
    module, _, name = row.target.partition(":")
    file = module_file(module)
    if file is None or file.suffix != ".py":
        return
    text = file.read_text()
    if row.backend in ("jit", "aot") or (not project.in_checkout and "kernels.jit" in text):
        yield from python_rules.thin(file, text, name)
    sources = re.findall(r"[\w/]+\.(?:cu|cuh|cpp)\b", text)
    if row.is_native or not sources:
        return
    spoken = [ast.get_docstring(ast.parse(text)) or ""]
    for folder in ("rapid_llm/kernels/csrc", "csrc", f"{file.parent.relative_to(project.root)}/csrc"):
        named = {project.root / folder / source for source in sources}
        same = (project.root / folder / op.group).glob(f"{op.function}*.cu")  # the paths share their device code
        for source in sorted({*named, *same}):
            spoken += ["\n".join(source.read_text(errors="replace").splitlines()[:12])] if source.is_file() else []
    if not any(_REASON.search(said) for said in spoken):
        fix = "say in the module's docstring, or at the top of its source, why the kernel isn't Triton"
        yield Finding(file, 1, "why-not-triton", f"{row.name} does not say why it isn't Triton", fix)


def _test_files(project: Project) -> dict[Path, str]:
    return {file: file.read_text() for file in sorted(project.tests.rglob("test_*.py"))}


def _defines(target: str) -> bool:
    """Whether the module has the attribute, by its source."""
    module, _, attr = target.partition(":")
    file = module_file(module)
    if file is None:
        return False
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == attr:
            return True
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == attr for a in node.names):
            return True
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == attr for t in node.targets):
            return True
    return False


def _docs(project: Project) -> Iterator[Finding]:
    """The generated pages, compared by their own generator."""
    env = {**os.environ, "PYTHONPATH": str(project.root)}
    command = [sys.executable, str(project.root / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["docs/generate.py failed"])[-1]
        yield Finding(project.root / "docs" / "ops.md", 1, "docs", said, "make docs")


def _sorted(project: Project) -> Iterator[Finding]:
    """Lists whose order is a promise: the extension's ops, and the sources of setup.py where they are listed."""
    extension = project.root / "csrc" / "common_extension.cc"
    if extension.is_file():
        text = extension.read_text()
        for what, pattern in _LISTS.items():
            listed = [(m[1], m.start(1)) for m in re.finditer(pattern, text, re.MULTILINE)]
            yield from _order(extension, text, listed, what)
    setup = project.root / "setup.py"
    if setup.is_file():
        text = setup.read_text()
        yield from _order(
            setup, text, [(m[1], m.start(1)) for m in re.finditer(r'"([\w/]+\.(?:cu|cc|cpp))"', text)], "sources"
        )
        for found in re.finditer(r"\b(?:r?glob)\(", text):
            line = text.count("\n", 0, found.start()) + 1
            if "sorted(" not in text.splitlines()[line - 1]:
                yield Finding(setup, line, "sorted", "files in the order of the disk", "wrap it in sorted(...)")


def _order(path: Path, text: str, names: list[tuple[str, int]], what: str) -> Iterator[Finding]:
    for (before, _), (after, at) in pairwise(names):
        if after < before:
            line = text.count("\n", 0, at) + 1
            yield Finding(path, line, "sorted", f"{what}: {after} stands behind {before}", "sort the list by name")


ALL: Final = (*cuda_rules.RULES, *python_rules.RULES, *RULES, "waiver")
"""Every rule that a waiver may name, and the one about waivers."""
