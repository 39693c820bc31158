"""Scaffolds in a checkout of this repository: what they add passes what every op and row must pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .support import copy_checkout, new, python

TESTS = (
    *("tests/kernels/test_conformance.py", "tests/kernels/registry/test_torch_ops.py"),
    *("tests/verify/test_oracles.py", "tests/verify/test_bounds.py", "tests/verify/test_work.py"),
    *("tests/verify/test_faulty.py", "tests/kernels/test_triton_compile.py"),
)
WHY = ("--why", "needs what Triton lacks")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy in which one op of a new group and one row of an op that exists were made."""
    root = copy_checkout(tmp_path_factory.mktemp("clone"))
    for words in (
        ("swap.around", "--group", "shuffling", "--path", "jit", *WHY),
        ("swap.twice", "--group", "shuffling", "--path", "external", "--library", "swaplib", *WHY),
        ("rmsnorm", "--path", "jit", "--variant", "two", *WHY),
        ("swap.here", "--group", "shuffling", "--path", "nvrtc", *WHY),
        ("swap.there", "--group", "activation", "--path", "aot", *WHY),
        ("swap.around", "--path", "aot", *WHY),
        ("swap.around", "--path", "nvrtc", *WHY),
    ):
        made = new(*words, cwd=root / "docs", root=root)
        assert made.returncode == 0, made.stderr
        assert f"in this checkout ({root})" in made.stdout
        assert "note:" not in made.stdout
    return root


@pytest.mark.compiles
def test_a_new_op_passes_the_suites(clone: Path) -> None:
    """Catches: an op without its second formulation, its example call, its plain row or its call as a torch op."""
    chosen = "(swap or rmsnorm_two or rmsnorm.two) and not kernels_compile"
    more = [str(path.relative_to(clone)) for path in sorted((clone / "tests").rglob("test_*swap*.py"))]
    assert len(more) == 10, more
    tested = python("-m", "pytest", "-q", "-k", chosen, *TESTS, *more, cwd=clone, root=clone)
    assert tested.returncode == 0, tested.stdout[-3000:]


def test_what_was_written_is_in_style(clone: Path) -> None:
    """Catches: a template that the linter or the formatter would change, and a stale docs/ops.md."""
    pytest.importorskip("ruff")
    written = [str(p) for p in clone.rglob("*swap*.py")]
    edited = [str(clone / p) for p in ("rapid_llm/kernels/ops", "tests/reference.py", "tests/kernels/examples.py")]
    assert any("benchmarks" in path for path in written)
    for command in (["check"], ["format", "--check"]):
        done = python("-m", "ruff", *command, "--no-cache", *written, *edited, cwd=clone, root=clone)
        assert done.returncode == 0, done.stdout
    done = python("docs/generate.py", "--check", cwd=clone, root=clone)
    assert done.returncode == 0, done.stderr


def test_the_extension_lists_the_op_in_order(clone: Path) -> None:
    """Catches: an op declared by one door only, at the end of a sorted list; a scaffold that breaks a convention."""
    library = (clone / "csrc" / "common_extension.cc").read_text()
    assert library.count("swap_there") == 4
    header = (clone / "csrc" / "include" / "rapid_llm_ext.h").read_text()
    assert header.count("void swap_there(") == 2
    checked = python("-m", "rapid_llm.cli", "kernels", "check", "--json", cwd=clone, root=clone)
    assert json.loads(checked.stdout)["findings"] == []


def test_an_op_is_not_made_twice(clone: Path) -> None:
    """Catches: files overwritten, and a row declared a second time."""
    done = new("swap.around", "--path", "jit", *WHY, cwd=clone, root=clone)
    assert done.returncode == 2
    assert "nothing was written" in done.stderr
    assert "--variant" in done.stderr


@pytest.mark.parametrize("group", ["arguments", "tile_policy", "include"])
def test_a_group_hides_no_module(clone: Path, group: str) -> None:
    """Catches: a folder ops/arguments/ before the module ops/arguments.py, after which no op imports."""
    done = new("hider", "--group", group, "--path", "triton", cwd=clone, root=clone)
    assert done.returncode == 2
    assert "choose another" in done.stderr


def test_a_library_that_is_known_is_extended_by_hand(clone: Path) -> None:
    """Catches: an adapter of a function that the library's stand-in lacks, which fails another suite."""
    words = ("gelu", "--group", "activation", "--path", "external", "--library", "flashinfer", *WHY)
    done = new(*words, cwd=clone, root=clone)
    assert done.returncode == 2
    assert "stand-in" in done.stderr
