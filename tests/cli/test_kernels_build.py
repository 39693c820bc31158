"""`rapid-llm kernels build`: what is built, what is said where it cannot be, and the editors' file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rapid_llm.authoring import builds
from rapid_llm.kernels import cpp, jit
from rapid_llm.kernels.build import toolchain
from rapid_llm.kernels.registry import ops, rows

from .support import rapid_llm


def test_rows_are_built_once_and_then_found(tmp_path: Path) -> None:
    """Catches: a build under another key than the row's own, and a second compile of what is there."""
    if missing := toolchain().reason("nvcc", "host compiler", "CUDA headers", "cudart", "Python.h", "architectures"):
        pytest.skip(missing)
    env = {"RAPID_LLM_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    first = rapid_llm("kernels", "build", "jit/scale", "--sm", "9.0", "--json", env=env)
    assert first.returncode == 0, first.stderr
    (built,) = json.loads(first.stdout)
    assert (built["name"], built["arch"], built["status"]) == ("jit/scale", "sm_90", "built")
    assert built["rows"] == ["jit/scale"]
    assert Path(built["path"]).is_file()
    again = rapid_llm("kernels", "build", "jit/scale", "--sm", "90", env=env)
    assert again.returncode == 0
    assert again.stdout.startswith("cached")
    assert "0 built, 1 cached, 0 skipped, 0 failed" in again.stdout


def test_a_path_whose_tools_are_missing_fails_where_it_is_named(tmp_path: Path) -> None:
    """Catches: status 0 for a row that was asked for and is not there, and 1 for an op whose other rows were built."""
    env = {"RAPID_LLM_CACHE_DIR": str(tmp_path), "CUDA_HOME": str(tmp_path / "nowhere")}
    named = rapid_llm("kernels", "build", "jit/scale", "--sm", "90", env=env)
    assert named.returncode == 1
    assert "failed" in named.stdout
    assert "has no bin/nvcc" in named.stdout
    by_op = rapid_llm("kernels", "build", "scale", "--sm", "90", env=env)
    assert by_op.returncode == 0, by_op.stderr
    assert "skipped  jit: nvcc:" in by_op.stdout


def test_an_error_of_the_compiler_is_shown_and_is_status_1(tmp_path: Path) -> None:
    """Catches: a broken build reported as good, or without its first error."""
    if cpp.available() is not True:
        pytest.skip(f"cpp: {cpp.available()}")
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\ncase $* in *--version*) echo broken 1.0;; *) echo 'x.cpp:1: error: no luck' >&2; exit 1;; esac\n"
    )
    compiler.chmod(0o755)
    env = {"RAPID_LLM_CACHE_DIR": str(tmp_path), "CXX": str(compiler)}
    done = rapid_llm("kernels", "build", "cpp/silu_and_mul", env=env)
    assert done.returncode == 1
    assert "error: no luck" in done.stdout
    assert "0 built, 0 cached, 0 skipped, 1 failed" in done.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "--all"),
        (["scale", "--all"], "--all"),
        (["nosuch"], "nosuch"),
        (["jit/nosuch"], "jit/nosuch"),
        (["sample", "--sm", "90"], "no compiled row"),
        (["jit/scale", "--sm", "new"], "--sm new"),
    ],
)
def test_usage(args: list[str], said: str) -> None:
    """Catches: a mistyped name that builds nothing and says nothing."""
    done = rapid_llm("kernels", "build", *args)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr


def test_every_compiled_row_has_its_builds() -> None:
    """Catches: a row whose module names its kernel in a way that `build` does not see."""
    import rapid_llm.kernels  # noqa: F401  (declares the ops)

    compiled = [row for op in ops() for row in rows(op.id) if row.backend in builds.PATHS]
    found = builds.builds(compiled, ("sm_90",))
    assert {row.name for row in compiled} == {name for one in found for name in one.rows}
    units = [one for one in found if one.path == "jit"]
    assert {one.name.partition("/")[2] for one in units} >= {"scale", "rmsnorm", "silu_and_mul", "linear"}


def test_the_editors_file_has_every_source(tmp_path: Path) -> None:
    """Catches: a source that an editor would show as full of errors."""
    file = tmp_path / "compile_commands.json"
    done = rapid_llm("kernels", "build", "--compile-commands", str(file))
    assert done.returncode == 0, done.stderr
    listed = json.loads(file.read_text())
    sources = {Path(entry["file"]) for entry in listed}
    assert sources >= {*jit.SOURCES.rglob("*.cu"), *cpp.SOURCES.rglob("*.cpp")}
    assert [p.name for p in tmp_path.iterdir()] == [file.name]
    for entry in listed:
        assert {"directory", "file", "arguments", "output"} == set(entry)
        assert all(
            Path(a).is_dir()
            for flag, a in zip(entry["arguments"], entry["arguments"][1:], strict=False)
            if flag == "-I"
        )
