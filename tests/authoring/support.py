"""Scratch copies of this checkout, and commands run in them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests import warm

ROOT = Path(__file__).parents[2]


def copy_checkout(folder: Path) -> Path:
    """What a scaffold reads and writes of this checkout, in `folder`."""
    ignore = shutil.ignore_patterns("__pycache__", "results", "*.so")
    for name in ("rapid_llm", "tests", "docs", "benchmarks", "csrc"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "setup.py"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder / name)
    return folder


def python(*args: str, cwd: Path, root: Path = ROOT, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    """`python ARGS` in `cwd`, with the package of the source tree at `root`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAPID_LLM_", "PYTEST_", "TRITON_INTERPRET"))}
    env = {**kept, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [warm.executable(), *args]
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )


def new(*args: str, cwd: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`rapid-llm kernels new ARGS`."""
    return python("-m", "rapid_llm.cli", "kernels", "new", *args, cwd=cwd, root=root)
