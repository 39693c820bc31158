"""Who may import whom, and what an import may bring."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rapid_llm"

# A room may import itself, the rooms named here, and what those may import.
ALLOWED = {
    "settings": set(),
    "platform": set(),
    "graphs": set(),
    "kernels": {"platform", "settings"},
    "verify": {"kernels", "graphs"},
    "bench": {"kernels", "graphs"},
    "tuning": {"bench", "verify"},
    "authoring": {"kernels"},
    "models": {"kernels"},
    "engine": {"models", "graphs"},
    "locate": {"engine", "verify"},
    "perf": {"engine", "bench"},
    "server": {"engine"},
    "cli": {"server", "engine", "bench", "verify", "authoring", "tuning", "locate", "perf"},
}

FOREIGN = ("torch", "triton", "transformers", "flashinfer")
COSTLY = {
    *("asyncio", "concurrent", "decimal", "email", "hashlib", "http", "multiprocessing", "pathlib", "shutil", "socket"),
    *("ssl", "subprocess", "tempfile", "unittest", "urllib", "uuid", "xml", "zipfile"),
}
"""Parts of the standard library that take milliseconds to import and that a command may do without."""


def _sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> set[str]:
    """Absolute names of every module of this package that the file imports, inside functions too."""
    module = _module(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base]) if base else ".".join(parent)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found if name.partition(".")[0] == "rapid_llm"}


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _reachable(room: str) -> set[str]:
    found, pending = {room}, [room]
    while pending:
        for other in ALLOWED[pending.pop()] - found:
            found.add(other)
            pending.append(other)
    return found


def test_every_room_has_a_rule() -> None:
    """Catches: a new package under rapid_llm that no arrow speaks of."""
    rooms = {_room(_module(path)) for path in _sources()} - {""}
    assert rooms <= set(ALLOWED), f"add a rule for {sorted(rooms - set(ALLOWED))}"


def test_arrows_point_down_only() -> None:
    """Catches: a kernel that imports the verifier, a model that imports the engine."""
    wrong = []
    for path in _sources():
        room = _room(_module(path))
        if not room:  # the package's own face offers names from every room
            continue
        allowed = _reachable(room)
        wrong += [
            f"{_module(path)} imports {name}"
            for name in sorted(_imports(path))
            if _room(name) in ALLOWED and _room(name) not in allowed
        ]
    assert not wrong, wrong


def test_the_rule_sees_relative_and_nested_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a checker that is blind to `from ..engine import x` or to an import in a function."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "rapid_llm" / "kernels" / "deep" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text("from ...engine import core\ndef f():\n    import rapid_llm.verify.cases\nfrom . import y\n")
    assert {_room(name) for name in _imports(path)} == {"engine", "verify", "kernels"}


def _python(*args: str, **env: str) -> str:
    """What a fresh interpreter prints; its error output is the message if it fails."""
    run = subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def _torch_free() -> list[str]:
    """The modules that pyproject.toml names for strict typing."""
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    paths = [path for file in files for path in (sorted((ROOT / file).rglob("*.py")) or [ROOT / file])]
    return ["rapid_llm", "rapid_llm.kernels", *(_module(path) for path in paths if path.name != "__main__.py")]


def test_the_core_imports_nothing_heavy() -> None:
    """Catches P39: torch or Triton imported by registration, by settings, or by a module that speaks of neither."""
    modules = _torch_free()
    assert len(modules) > 30
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [m for m in {FOREIGN!r} if m in sys.modules]\n"
        "    if heavy: raise SystemExit(f'importing {name} imports {heavy}')\n"
    )
    _python("-c", code)


def test_importing_the_kernels_brings_little() -> None:
    """Catches P39: what every command would pay for. `benchmarks.dispatch` has the time that it takes."""
    code = (
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nbefore = set(sys.modules)\n"
        "import rapid_llm.kernels\nprint(*set(sys.modules) - before)"
    )
    brought = {name.partition(".")[0] for name in _python("-ISc", code).split()}
    assert "rapid_llm" in brought
    assert not brought & COSTLY
    assert brought <= {*sys.stdlib_module_names, "rapid_llm"}
