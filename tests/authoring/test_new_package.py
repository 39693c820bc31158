"""Scaffolds as packages of their own: what they write passes at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rapid_llm.kernels import cpp

from .support import new, python

WHY = ("--why", "needs what Triton lacks")


@pytest.mark.parametrize(
    ("words", "row"),
    [
        (("swap", "--group", "elementwise", "--path", "cpp", *WHY), "cpp/swap"),
        (("swap", "--group", "elementwise", "--path", "external", "--library", "swaplib", *WHY), "swaplib/swap"),
        (("rmsnorm", "--path", "cpp", *WHY), "my_rows/rmsnorm"),
    ],
    ids=["cpp", "external", "row of an op that exists"],
)
def test_a_package_passes_its_tests_at_once(words: tuple[str, ...], row: str, tmp_path: Path) -> None:
    """Catches: a template that no longer fits the registry, the suite, the build engine or the door of C++."""
    if "cpp" in words and cpp.available() is not True:
        pytest.skip(f"cpp: {cpp.available()}")
    made = new(*words, "--into", "my_rows", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert f"{row} in a package of its own, my_rows" in made.stdout
    package = tmp_path / "my_rows"
    tested = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not bits", cwd=package)
    assert tested.returncode == 0, tested.stdout[-3000:]
    assert "passed" in tested.stdout
    listed = python("-c", LIST, cwd=package)
    assert row in listed.stdout.split(), listed.stderr


LIST = """
import my_rows
from rapid_llm.kernels.registry import plugins, ops, rows
plugins.scan()
my_rows.register()
print(*(row.name for op in ops() for row in rows(op.id)))
"""


@pytest.mark.parametrize("path", ["triton", "jit", "nvrtc", "cpp", "external"])
def test_a_dry_run_lists_what_a_run_writes_and_writes_nothing(path: str, tmp_path: Path) -> None:
    """Catches: a dry run that writes, or that names other files than the run."""
    words = ["swap", "--group", "elementwise", "--path", path, *WHY, "--into", "made", "--json"]
    words += ["--library", "swaplib"] if path == "external" else []
    dry = new(*words, "--dry-run", cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    assert not list(tmp_path.iterdir())
    wet = new(*words, cwd=tmp_path)
    assert wet.returncode == 0, wet.stderr
    named = {Path(file) for file in json.loads(wet.stdout)["files"]}
    assert named == {Path(file) for file in json.loads(dry.stdout)["files"]}
    assert named == {p for p in tmp_path.rglob("*") if p.is_file()}
    again = new(*words, cwd=tmp_path)
    assert again.returncode == 2
    assert "nothing was written" in again.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["swap", "--path", "triton"], "--group"),
        (["swap", "--group", "g", "--path", "cuda"], "--path cuda: use one of triton"),
        (["swap", "--group", "g", "--path", "jit"], "--why"),
        (["Swap", "--group", "g", "--path", "triton"], "Error: Swap: field 'id'"),
        (["class", "--group", "g", "--path", "triton"], "function"),
        (["swap", "--group", "G!", "--path", "triton"], "--group G!"),
        (["swap", "--group", "g", "--path", "external", *WHY], "--library"),
        (["swap", "--group", "g", "--path", "aot", *WHY], "--path jit"),
        (["scale", "--path", "triton"], "native row"),
        (["scale", "--group", "g", "--path", "jit", *WHY], "elementwise"),
        (["sample", "--path", "jit", *WHY], "no float tensor"),
        (["attention_decode", "--group", "g", "--path", "triton"], "attention.decode"),
        (["swap", "--group", "g", "--path", "jit", "--why", "naïve"], "ASCII"),
        (["swap", "--group", "g", "--path", "jit", "--why", "ends in \\"], "plain text"),
        (["swap", "--group", "g", "--path", "jit", "--why", '"""'], "plain text"),
    ],
)
def test_what_cannot_be_made_is_refused(words: list[str], said: str, tmp_path: Path) -> None:
    """Catches: a scaffold that the registry, Python or a compiler would refuse afterwards."""
    done = new(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert done.stderr.startswith("Error: "), done.stderr
    assert not list(tmp_path.iterdir())
