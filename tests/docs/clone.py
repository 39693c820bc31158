"""A scratch copy of this repository in which a guide is followed, command by command."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from .pages import ROOT, Block, missing_piece

_LEFT_OUT: Final = shutil.ignore_patterns("*.egg-info", "*.so")
"""Byte code is copied: it stays valid, as the times of the sources are, and each command would write it anew."""
_FOLDERS: Final = ("rapid_llm", "csrc", "tests", "benchmarks", "docs")
_FILES: Final = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
TIMEOUT_S: Final = 300.0


class Clone:
    """The copy, and what a shell in it sees: this interpreter as `python`, a cache and a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "clone"
        self.root.mkdir(parents=True)
        for name in _FOLDERS:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.root / name, ignore=_LEFT_OUT)
        for name in _FILES:
            if (ROOT / name).is_file():
                shutil.copy(ROOT / name, self.root / name)
        if (objects := ROOT / "build" / "objects").is_dir():  # by content: the guide compiles what it adds
            shutil.copytree(objects, self.root / "build" / "objects", ignore=shutil.ignore_patterns("*.draft"))
        self.environment = _environment(self.root, folder)

    def follow(self, block: Block) -> None:
        """Do what the block asks of the reader; raises AssertionError where the page promises something else."""
        if path := block.notes.get("writes"):
            file = self.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        elif path := block.notes.get("appends"):
            file = self.root / path
            file.write_text(f"{file.read_text()}\n{block.text}")
        elif path := block.notes.get("replaces"):
            file = self.root / path
            file.write_text(replaced(file.read_text(), block))
        elif block.language == "console":
            self._run(block)

    def _run(self, block: Block) -> None:
        commands = block.commands()
        for command in commands:
            done = subprocess.run(
                ["bash", "-c", command.text],
                cwd=self.root,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT_S,
            )
            said = f"{block.where}: $ {command.text}\n{done.stdout}"
            expected = block.status if command is commands[-1] else 0
            assert done.returncode == expected, f"{said}\nended with {done.returncode}, not {expected}"
            missing = missing_piece(command.output, done.stdout)
            assert missing is None, f"{said}\nthe page promises {missing!r}, which is not there (or not in this order)"


def replaced(text: str, block: Block) -> str:
    """`text` with the block's functions, and imports of one module, in the place of its own; raises AssertionError."""
    lines = block.text.splitlines()
    for node in ast.parse(block.text).body:
        old = [other for other in ast.parse(text).body if _same(node, other)]
        assert len(old) == 1, f"{block.where}: line {node.lineno} replaces {len(old)} parts of the file, not one"
        begin, end = _span(old[0])
        rows = text.splitlines()
        rows[begin:end] = lines[slice(*_span(node))]
        text = "\n".join(rows) + "\n"
    return text


def _same(node: ast.stmt, other: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef):
        return isinstance(other, ast.FunctionDef) and other.name == node.name
    return isinstance(node, ast.ImportFrom) and isinstance(other, ast.ImportFrom) and other.module == node.module


def _span(node: ast.stmt) -> tuple[int, int]:
    """First line, decorators included, and one past the last, from 0."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return first - 1, node.end_lineno or node.lineno


def _environment(root: Path, folder: Path) -> dict[str, str]:
    bin_ = folder / "bin"
    bin_.mkdir()
    for name, words in {"python": "", "pytest": "-m pytest", "rapid-llm": "-m rapid_llm.cli"}.items():
        script = bin_ / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        script.chmod(0o755)
    foreign = ("RAPID_LLM_", "TORCH_CUDA_ARCH", "PYTEST_", "PYTHONDONTWRITE", "TRITON_INTERPRET")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {
        **kept,
        "PATH": f"{bin_}{os.pathsep}{kept['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), kept.get("PYTHONPATH")))),
        "RAPID_LLM_CACHE_DIR": str(folder / "cache"),
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }


def lacking(needs: tuple[str, ...]) -> str:
    """Why a block cannot be run on this machine, or ''."""
    for need in needs:
        if need not in _CHECKS:
            raise ValueError(f"needs: {need!r} is none of {', '.join(_CHECKS)}")
        reason = _CHECKS[need]()
        if reason:
            return reason
    return ""


def _gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "torch sees no NVIDIA GPU"


def _no_gpu() -> str:
    return "shows what happens without a GPU" if not _gpu() else ""


def _nvcc() -> str:
    from rapid_llm.kernels.build import toolchain

    return toolchain().reason()


def _cxx() -> str:
    from rapid_llm.kernels import cpp

    found = cpp.available()
    return "" if found is True else str(found)


def _nvrtc() -> str:
    from rapid_llm.kernels.nvrtc import library

    return library().reason


def _triton() -> str:
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


_CHECKS: Final = {"gpu": _gpu, "no gpu": _no_gpu, "nvcc": _nvcc, "nvrtc": _nvrtc, "cxx": _cxx, "triton": _triton}
