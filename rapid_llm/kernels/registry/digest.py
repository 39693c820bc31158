"""A digest of everything that a row's answers are made of: its Python, its C++ and CUDA, its flags, its declaration.

From the target function (and `prepack`) the digest follows every module-level name of the row's own package that the
code uses, through imports, and every source of `csrc/` that it names as a string, with the headers that it includes.
Python counts by its syntax tree, without comments, docstrings and positions, in a form that is the same in every
supported Python; C++ and CUDA count by their bytes. Versions of libraries are no part of it.

There are two tiers. `raw` is the hash of the files' bytes and costs next to nothing; only where it moved is the tree
looked at. Names reached by `getattr` or by a star import are not seen. Nothing here imports the code that it reads.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .records import Source
from .spec import KernelSpec, OpSpec

__all__ = ["Source", "raw_of", "serialise", "source_of"]

_KERNELS: Final = "rapid_llm.kernels"
_NOT_FOLLOWED: Final = (
    *(f"{_KERNELS}.{name}" for name in ("registry", "build", "jit", "nvrtc", "cpp", "aot", "preparation")),
    *(f"{_KERNELS}.ops.{name}" for name in ("triton_support", "deferred_triton")),
    *("rapid_llm.settings", "rapid_llm.platform"),
)
"""How code is built, chosen, loaded and launched: it decides whether a row answers, not what."""

_CHOICES: Final = frozenset({(f"{_KERNELS}.ops.tile_policy", name) for name in ("resolve_tiles", "tiles")})
"""Names that are not followed either: they find a row's tiles. What the row itself says of tiles is part of it."""

_FLAGS: Final = {
    f"{_KERNELS}.jit": ((f"{_KERNELS}.jit", "_unit"), (f"{_KERNELS}.build.compilers", "NVCC_FLAGS")),
    f"{_KERNELS}.cpp": tuple((f"{_KERNELS}.cpp", name) for name in ("FLAGS", "LEVELS", "_AVX2", "_AVX512", "_unit")),
    f"{_KERNELS}.nvrtc": ((f"{_KERNELS}.nvrtc.kernels", "FLAGS"),),
}
"""What those modules say of the flags of whoever uses them: module -> (module, name) pairs."""

_SOURCE: Final = re.compile(r"[\w./-]+\.(cu|cuh|cpp|cc|h|hpp)")
_INCLUDE: Final = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_SKIPPED: Final = frozenset({"ctx", "kind", "type_comment", "type_ignores"})


def source_of(row: KernelSpec, op: OpSpec) -> Source | None:
    """The row's source as it is on disk now; None where it cannot be read (a row made up in an interactive session)."""
    root = _root(row.target)
    if root is None:
        return None
    walk = _Walk(root, row.target.partition(".")[0].partition(":")[0])
    for target in (row.target, row.prepack):
        if target is not None:
            module, _, attr = target.partition(":")
            walk.name(module, attr.partition(".")[0])
    if not walk.parts:
        return None
    outside = _extension_files(root, row)
    inside = _with_headers(root, walk.sources)
    text = [_declaration(row, op), *(f"{key}={walk.parts[key]}" for key in sorted(walk.parts))]
    text += [f"{name}={_sha(root / name)}" for name in sorted(inside)]
    files = tuple(sorted({*walk.files, *inside, *outside}))
    extension = _hash(f"{name}={_sha(root / name)}" for name in sorted(outside)) if outside else ""
    return Source(_hash(text), _raw(root, row, op, files), files, extension)


def raw_of(row: KernelSpec, op: OpSpec, files: Iterable[str]) -> str | None:
    """The hash of the bytes of `files` and of the row's declaration; None where the package cannot be found."""
    root = _root(row.target)
    return None if root is None else _raw(root, row, op, files)


def _raw(root: Path, row: KernelSpec, op: OpSpec, files: Iterable[str]) -> str:
    return _hash([_declaration(row, op), *(f"{name}={_sha(root / name)}" for name in files)])


def _declaration(row: KernelSpec, op: OpSpec) -> str:
    """What of the row's own declaration decides on what it was tried, and against which bound."""
    require = " ".join(str(dim) for dim in row.shape.require)
    parts = (op.schema, row.target, row.prepack, row.schemes, row.roundings, row.layout, require, row.graph_safe)
    return repr((*parts, "batch_invariant") if row.batch_invariant else parts)


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:20]


_shas: Final[dict[Path, tuple[tuple[int, int, int], str]]] = {}


def _sha(path: Path) -> str:
    """The hash of a file's bytes, remembered until its time or size changes; "absent" where there is none."""
    try:
        stat = path.stat()
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        known = _shas.get(path)
        if known is None or known[0] != seen:
            known = _shas[path] = (seen, hashlib.sha256(path.read_bytes()).hexdigest()[:20])
        return known[1]
    except OSError:  # a source that is not installed is a fact, not a fault
        return "absent"


def _root(target: str) -> Path | None:
    """The folder that holds the top-level package or module of `target`, which is not imported for that."""
    top = target.partition(":")[0].partition(".")[0]
    place = getattr(sys.modules.get(top), "__file__", None)
    if place is None:
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return None
        place = None if spec is None else spec.origin
    path = None if place is None else Path(place).absolute()
    return None if path is None else path.parent.parent if path.name == "__init__.py" else path.parent


# -- C++ and CUDA -----------------------------------------------------------------------------------------------------


def _extension_files(root: Path, row: KernelSpec) -> set[str]:
    """The sources at the repository's root of a row of the AOT extension, which the wrapper does not name."""
    if row.backend != "aot":
        return set()
    module = row.target.partition(":")[0].split(".")
    source = root / "csrc" / module[-2] / f"{module[-1].removesuffix('_aot')}.cu" if len(module) > 1 else root
    return _with_headers(root, {source.relative_to(root).as_posix()}) if source.is_file() else set()


def _with_headers(root: Path, sources: Iterable[str]) -> set[str]:
    """`sources` and every own header that they include."""
    found: set[str] = set()
    pending = [root / name for name in sources]
    while pending:
        path = pending.pop()
        name = path.relative_to(root).as_posix()
        if name in found:
            continue
        found.add(name)
        for text in _INCLUDE.findall(path.read_bytes()):
            header = _header(root, path, text.decode("utf-8", "replace"))
            if header is not None:
                pending.append(header)
    return found


def _header(root: Path, source: Path, text: str) -> Path | None:
    """Where `#include "text"` leads to; None for a header of somebody else."""
    tops = [p for p in source.parents if p.name == "csrc" and p.is_relative_to(root)]
    tops.append(root / "rapid_llm" / "kernels" / "csrc")
    for folder in (source.parent, *(f for top in tops for f in (top, top / "include"))):
        path = Path(os.path.normpath(folder / text))
        if path.is_file() and path.is_relative_to(root):
            return path
    return None


# -- Python -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Module:
    """A module's top level: which statements bind a name, what its imports mean, what runs without binding."""

    name: str
    path: Path
    defs: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    loose: list[ast.stmt] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)

    def hash_of(self, name: str) -> str:
        """The hash of the statements that bind `name`; of the loose ones for ""."""
        if name not in self.hashes:
            statements = self.defs[name] if name else self.loose
            self.hashes[name] = _hash(["".join(serialise(s) for s in statements)])
        return self.hashes[name]


_parsed: Final[dict[Path, tuple[str, _Module]]] = {}


class _Walk:
    """Collects, from a name on, all that it is made of. parts: "module:name" -> hash of its tree."""

    def __init__(self, root: Path, top: str) -> None:
        self.root = root
        self.top = top
        self.parts: dict[str, str] = {}
        self.files: set[str] = set()
        self.sources: set[str] = set()
        self._whole: set[str] = set()

    def name(self, module: str, name: str) -> None:
        """Follow the name `name` of a module."""
        if not self._own(module) or (module, name) in _CHOICES:
            return
        stop = next((m for m in _NOT_FOLLOWED if module == m or module.startswith(m + ".")), None)
        if stop is not None:
            for place, flag in _FLAGS.get(stop, ()):
                self._take(place, flag, follow=False)
            return
        self._take(module, name, follow=True)

    def whole(self, module: str) -> None:
        """Follow everything in a module."""
        found = self._module(module) if self._own(module) else None
        if found is None or module in self._whole:
            return
        self._whole.add(module)
        for name in (*found.defs, *found.imports):
            self.name(module, name)

    def _own(self, module: str) -> bool:
        return module == self.top or module.startswith(self.top + ".")

    def _take(self, module: str, name: str, *, follow: bool) -> None:
        key = f"{module}:{name}"
        found = self._module(module)
        if found is None or key in self.parts:
            return
        statements = found.defs.get(name)
        if statements is None:
            self._imported(found, name, follow)
            return
        self.files.add(found.path.relative_to(self.root).as_posix())
        self.parts[key] = found.hash_of(name)
        if not follow:
            return
        for statement in statements:
            self._uses(found, statement)
        if f"{module}:" not in self.parts and found.loose:
            self.parts[f"{module}:"] = found.hash_of("")
            for statement in found.loose:
                self._uses(found, statement)

    def _imported(self, found: _Module, name: str, follow: bool) -> None:
        """`name` is no definition of the module: an import of its own, or one of its submodules."""
        if not follow:
            return
        if name in found.imports:
            self.files.add(found.path.relative_to(self.root).as_posix())
            module, attr = found.imports[name]
            if attr is None or self._module(f"{module}.{attr}") is not None:
                self.whole(module if attr is None else f"{module}.{attr}")
            else:
                self.name(module, attr)

    def _uses(self, found: _Module, statement: ast.stmt) -> None:
        """Follow every name, attribute of a module, import and source file that a statement mentions."""
        local = dict(found.imports)
        for node in ast.walk(statement):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                local.update(_names(found, node))
        owners: set[int] = set()
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = self._meaning(local, node.value.id)
                if module is not None:
                    owners.add(id(node.value))
                    self.name(module, node.attr)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and id(node) not in owners:
                self._bare(found, local, node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _SOURCE.fullmatch(node.value):
                self._source(found, node.value)

    def _meaning(self, local: dict[str, tuple[str, str | None]], name: str) -> str | None:
        """The own module that a local name stands for."""
        if name not in local:
            return None
        module, attr = local[name]
        full = module if attr is None else f"{module}.{attr}"
        return full if self._own(full) and self._module(full) is not None else None

    def _bare(self, found: _Module, local: dict[str, tuple[str, str | None]], name: str) -> None:
        module = self._meaning(local, name)
        if module is not None:
            self.whole(module)
        elif name in found.defs:
            self._take(found.name, name, follow=True)
        elif name in local and local[name][1] is not None:
            self.name(local[name][0], str(local[name][1]))

    def _source(self, found: _Module, text: str) -> None:
        """A string that names a C++ or CUDA source, below a folder `csrc` or beside the module."""
        for folder in found.path.parents:
            if not folder.is_relative_to(self.root):
                return
            for path in (folder / "csrc" / text, folder / text):
                if path.is_file():
                    self.sources.add(path.relative_to(self.root).as_posix())
                    return

    def _module(self, name: str) -> _Module | None:
        path = self.root.joinpath(*name.split("."))
        path = path / "__init__.py" if (path / "__init__.py").is_file() else path.with_suffix(".py")
        if not path.is_file():
            return None
        sha = _sha(path)
        known = _parsed.get(path)
        if known is None or known[0] != sha:
            known = _parsed[path] = (sha, _parse(name, path))
        return known[1]


def _parse(name: str, path: Path) -> _Module:
    module = _Module(name, path)
    for statement in ast.parse(path.read_bytes(), filename=str(path)).body:
        _sort(module, statement)
    return module


def _is_entered(module: _Module, decorator: ast.expr) -> bool:
    """Whether a decorator enters a function somewhere, `@tiles("scale")`: it is then called without being named."""
    if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Name):
        return False
    return module.imports.get(decorator.func.id, ("",))[0].partition(".")[0] == module.name.partition(".")[0]


def _sort(module: _Module, statement: ast.stmt) -> None:
    """Enter a top-level statement under every name that it binds."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        module.imports.update(_names(module, statement))
    elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        module.defs.setdefault(statement.name, []).append(statement)
        if any(_is_entered(module, decorator) for decorator in statement.decorator_list):
            module.loose.append(statement)
    elif isinstance(statement, ast.Expr):
        registers = isinstance(statement.value, ast.Call) and ast.unparse(statement.value.func).endswith("register")
        if not registers and not isinstance(statement.value, ast.Constant):
            module.loose.append(statement)
    elif not (isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING")):
        for name in _bound(module, statement):
            module.defs.setdefault(name, []).append(statement)


def _bound(module: _Module, statement: ast.stmt) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module.imports.update(_names(module, node))
    return names


def _names(module: _Module, node: ast.Import | ast.ImportFrom) -> dict[str, tuple[str, str | None]]:
    """What an import binds: local name -> (module, attribute or None for the module itself)."""
    if isinstance(node, ast.Import):
        return {a.asname or a.name.partition(".")[0]: (a.name, None) for a in node.names}
    base = node.module or ""
    if node.level:
        package = module.name.split(".") if module.path.name == "__init__.py" else module.name.split(".")[:-1]
        parent = package[: len(package) - node.level + 1]
        base = ".".join([*parent, base]) if base else ".".join(parent)
    return {a.asname or a.name: (base, a.name) for a in node.names}


def serialise(node: ast.AST, *, docstrings: bool | None = None) -> str:
    """A tree as text: names of nodes and fields, nothing of positions, comments, docstrings or empty fields.

    A string that stands alone is a docstring and left out, unless the tree mentions `__doc__`.
    """
    if docstrings is None:
        docstrings = any(isinstance(n, ast.Attribute) and n.attr == "__doc__" for n in ast.walk(node))
    return "".join(_pieces(node, docstrings))


def _pieces(node: object, docstrings: bool) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        yield f"{type(node.value).__name__}:{node.value!a}"
    elif isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name in node._fields:
            value = getattr(node, name, None)
            if name in _SKIPPED or value is None or value == []:
                continue
            yield f" {name}="
            yield from _pieces(value, docstrings)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            alone = isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
            if docstrings or not (alone and isinstance(item.value.value, str)):
                yield from _pieces(item, docstrings)
                yield ","
        yield "]"
    else:
        yield ascii(node)
