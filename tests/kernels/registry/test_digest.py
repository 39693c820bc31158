"""What makes a row stale: each test edits a copy of a small package and looks at which digests move."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import KernelSpec, digest
from rapid_llm.kernels.registry.records import Source
from tests import scratch

ROWS = '''
"""Two rows."""
from made_rows import tiles
from made_rows.helpers import shared, Block
from .loader import load

_first = load("first", "group/first.cu")
_SIZES = {"small": 1}

def first(input, weight, factor=1.0, out=None):
    """Doubles."""  # and says so
    return shared(_first, input)

def second(input, weight, factor=1.0, out=None):
    from made_rows.inner import deep
    return deep(Block(), _SIZES["small"], tiles.width())
'''
FILES = {
    "__init__.py": "",
    "rows.py": ROWS,
    "loader.py": "def load(name, source):\n    return source\n",
    "helpers.py": "def shared(f, x):\n    return 2 * x\n\nclass Block:\n    size = 4\n\ndef unused():\n    return 1\n",
    "inner.py": "def deep(*a):\n    return _limit\n\n_limit = 3 if True else 4\n",
    "tiles.py": "def width():\n    return 8\n\ndef height():\n    return 9\n",
    "csrc/group/first.cu": '#include "made.h"\n#include <cuda.h>\nint main() { return 0; }  // a comment\n',
    "csrc/include/made.h": '#include "deeper.h"\n',
    "csrc/include/deeper.h": "#define WIDTH 4\n",
    "csrc/include/other.h": "#define OTHER 4\n",
}


class Package:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "made_rows"
        for name, text in FILES.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def source(self, name: str, **changes: object) -> Source:
        found = digest.source_of(self.row(name, **changes), scratch.op_spec())
        assert found is not None
        return found

    def row(self, name: str, **changes: object) -> KernelSpec:
        return scratch.row(f"made/scratch.{name}", f"made_rows.rows:{name}", available="x:y", **changes)

    def moved(self) -> set[str]:
        """The rows whose digest differs from the one before the edits."""
        return {name for name, old in self.before.items() if self.source(name).digest != old}

    def edit(self, name: str, old: str, new: str) -> set[str]:
        self.before = {row: self.source(row).digest for row in ("first", "second")}
        path = self.folder / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        return self.moved()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Package(tmp_path)
    assert "made_rows" not in sys.modules, "a digest must not import the code that it reads"


@pytest.mark.parametrize(
    ("name", "old", "new", "stale"),
    [
        ("rows.py", "shared(_first, input)", "shared(_first, weight)", {"first"}),
        ("rows.py", '"small": 1', '"small": 2', {"second"}),
        ("helpers.py", "2 * x", "3 * x", {"first"}),
        ("helpers.py", "size = 4", "size = 5", {"second"}),
        ("inner.py", "3 if", "5 if", {"second"}),
        ("tiles.py", "return 8", "return 7", {"second"}),
        ("csrc/group/first.cu", "return 0", "return 1", {"first"}),
        ("csrc/group/first.cu", "a comment", "another", {"first"}),
        ("csrc/include/deeper.h", "WIDTH 4", "WIDTH 8", {"first"}),
        ("helpers.py", "return 1\n", "return 2\n", set()),
        ("tiles.py", "return 9", "return 1", set()),
        ("csrc/include/other.h", "OTHER 4", "OTHER 5", set()),
        ("rows.py", "# and says so", "# in other words", set()),
        ("rows.py", "Doubles.", "Is doubled.", set()),
        ("rows.py", "def second", "\n\n\ndef second", set()),
        ("__init__.py", "", "__version__ = '2'\n", set()),
    ],
)
def test_an_edit_makes_exactly_its_rows_stale(package: Package, name: str, old: str, new: str, stale: set[str]) -> None:
    """Catches: a helper, constant, class or header that is not followed; a row that goes stale for a neighbour's sake,
    a comment or a version."""
    assert package.edit(name, old, new) == stale


def test_what_a_row_declares_is_part_of_it(package: Package) -> None:
    """Catches: a requirement that is dropped, so that the row is taken for shapes on which it was never tried."""
    plain = package.source("first")
    assert package.source("first", layout=("contiguous",)).digest != plain.digest
    assert package.source("first", priority=7).digest == plain.digest


def test_the_raw_hash_moves_with_every_byte(package: Package) -> None:
    """Catches: the quick tier that misses an edit, so that the tree is never looked at."""
    row, op = package.row("first"), scratch.op_spec()
    source = package.source("first")
    assert digest.raw_of(row, op, source.files) == source.raw
    package.edit("rows.py", "# and says so", "# and no more")
    assert digest.raw_of(row, op, source.files) != source.raw


def test_a_docstring_that_is_read_counts() -> None:
    """Catches: code that prints or parses its own docstring, and is taken for unchanged."""
    trees = [ast.parse(f'def f():\n    "{text}"\n    return f.__doc__') for text in ("a", "b")]
    assert digest.serialise(trees[0]) != digest.serialise(trees[1])


def test_the_form_is_the_same_in_every_python() -> None:
    """Catches: a field that one Python version has and another lacks in the text that is hashed."""
    text = "def f[T](x: T = 1.5, *a, k=b'\\x00'):\n    return f'{x!r:>4}'" if sys.version_info >= (3, 12) else ""
    text = text or "def f(x: T = 1.5, *a, k=b'\\x00'):\n    return f'{x!r:>4}'"
    form = digest.serialise(ast.parse(text).body[0])
    assert "lineno" not in form
    assert "ctx" not in form
    simple = digest.serialise(ast.parse("def f(x, /, y=1):\n    return x.a[y:2] + 'é'").body[0])
    assert simple == (
        "(FunctionDef name='f' args=(arguments posonlyargs=[(arg arg='x'),] args=[(arg arg='y'),] defaults=[int:1,])"
        " body=[(Return value=(BinOp left=(Subscript value=(Attribute value=(Name id='x') attr='a') slice=(Slice "
        "lower=(Name id='y') upper=int:2)) op=(Add) right=str:'\\xe9')),])"
    )


def test_every_shipped_row_has_a_source() -> None:
    """Catches: a row of this package whose code the digest cannot find, and which could never be proven."""
    import rapid_llm.kernels.ops  # noqa: F401

    for op in registry.ops():
        for row in registry.rows(op.id):
            if not registry.registry.is_shipped(row.name):
                continue
            source = digest.source_of(row, op)
            assert source is not None, row.name
            suffixes = {Path(name).suffix for name in source.files}
            wanted = {"jit": ".cu", "cpp": ".cpp", "nvrtc": ".cuh"}.get(row.backend, ".py")
            assert wanted in suffixes, f"{row.name}: {source.files}"


def test_flags_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches P57: fast-math switched on for every CUDA row, and none of them stale."""
    import rapid_llm.kernels.ops  # noqa: F401

    for name, path in (("jit/scale", "build/compilers.py"), ("nvrtc/scale", "nvrtc/kernels.py")):
        row = registry.get_row(name)
        source = digest.source_of(row, registry.get_op(row.op))
        assert source is not None
        assert f"rapid_llm/kernels/{path}" in source.files
