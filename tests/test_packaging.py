"""What is packed: a wheel of pure Python, or with RAPID_LLM_BUILD_EXT=1 one with the extension, for every Python.

The wheels are built from a copy of what git tracks, by this environment's setuptools; the one with the extension by an
nvcc that answers as the real one does and compiles nothing.
"""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rapid_llm.kernels import aot
from rapid_llm.kernels.build import toolchain
from tests.kernels.extension import GOOD, ROOT, builder, size_tool, stand_in

PURE_BUDGET_MB = 2.0

NVCC = """#!/bin/sh
case "$*" in
*" -c "*|"-c "*) echo "$@" >> "$LOG"; for last; do :; done; : > "$last" ;;
*"-shared"*) echo "$@" >> "$LOG"; for last; do :; done; cp "$LIBRARY" "$last" ;;
*) exec "$REAL" "$@" ;;
esac
"""
"""Notes what it is told to compile or link; hands every question on to the real one."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git knows, as they are here."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("the files to pack are those that git tracks, and this is no clone")
    copy = tmp_path_factory.mktemp("checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def pack(checkout: Path, kind: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call the build backend as a front end does: a process in the checkout, with `dist` as the place for results."""
    code = (
        f"from setuptools import build_meta; import os; os.makedirs('dist', exist_ok=True); build_meta.{kind}('dist')"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("RAPID_LLM_BUILD_EXT", "TORCH_CUDA_ARCH_LIST")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, env={**env, **environment}
    )


def packed(checkout: Path, kind: str, **environment: str) -> Path:
    """The one file that was made."""
    shutil.rmtree(checkout / "dist", ignore_errors=True)
    done = pack(checkout, kind, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (made,) = (checkout / "dist").iterdir()
    return made


def test_the_plain_wheel_is_pure_python(checkout: Path) -> None:
    """Catches: [A2] a wheel that needs a compiler, or carries a library of this machine; [P73] its size; a source or a
    template that is left out, so that a kernel cannot be compiled where it is installed; [P74] torch's range."""
    (checkout / "rapid_llm" / aot.FILE).write_bytes(b"a build of this checkout, which is not to be packed")
    wheel = packed(checkout, "build_wheel")
    (checkout / "rapid_llm" / aot.FILE).unlink()
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (email.message_from_bytes(archive.read(n)) for n in names if n.endswith("/METADATA"))
    assert not [n for n in names if n.endswith((".so", ".o", ".pyc"))]
    assert not [n for n in names if n.startswith(("csrc/", "tests/", "benchmarks/", "docs/"))]
    kernels = checkout / "rapid_llm" / "kernels" / "csrc"
    assert {p.relative_to(checkout).as_posix() for p in kernels.rglob("*") if p.is_file()} <= names
    target = ".".join(map(str, builder().TORCH_TARGET))
    assert f"torch>={target}" in [r for r in metadata.get_all("Requires-Dist", []) if r.startswith("torch")]
    assert wheel.stat().st_size <= PURE_BUDGET_MB * 1e6, size_tool().report(wheel)


def test_the_source_distribution_holds_the_extension(checkout: Path) -> None:
    """Catches: an sdist from which RAPID_LLM_BUILD_EXT=1 cannot build."""
    import tarfile

    made = packed(checkout, "build_sdist")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cu", ".cc", ".h")}
    assert {*sources, "csrc/build.py", "setup.py"} <= names


@pytest.fixture
def nvcc(tmp_path: Path) -> dict[str, str]:
    """The environment that makes the stand-in the compiler."""
    tools = toolchain()
    missing = tools.reason("nvcc", "host compiler", "CUDA headers", "cudart", "Python.h")
    if missing or tools.nvcc is None:
        pytest.skip(f"needs the answers of a real toolkit: {missing}")
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "nvcc"
    script.write_text(NVCC)
    script.chmod(0o755)
    library, log = stand_in(tmp_path, GOOD), tmp_path / "log"
    return {"CUDA_HOME": str(tmp_path), "REAL": str(tools.nvcc), "LIBRARY": str(library), "LOG": str(log)}


def test_the_wheel_with_the_extension_is_for_every_python(checkout: Path, nvcc: dict[str, str]) -> None:
    """Catches: [A2] a wheel tagged for one Python; sources out of order; a list of architectures or -O3 dropped; a
    library that does not say what it was built for."""
    environment = {**nvcc, "RAPID_LLM_BUILD_EXT": "1", "MAX_JOBS": "1", "TORCH_CUDA_ARCH_LIST": "8.0;9.0+PTX"}
    wheel = packed(checkout, "build_wheel", **environment)
    assert "-cp311-abi3-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        (library,) = (n for n in archive.namelist() if n.endswith(".so"))
    assert library == f"rapid_llm/{aot.FILE}"
    *compiled, linked = Path(nvcc["LOG"]).read_text().splitlines()
    sources = [*sorted((checkout / "csrc").rglob("*.cu")), checkout / "csrc" / "common_extension.cc"]
    assert [line.split()[-3] for line in compiled] == [str(path) for path in sources]
    for line in compiled[:-1]:
        assert "-O3" in line
        codes = [word.partition("code=")[2] for word in line.split() if word.startswith("arch=")]
        assert codes == ["sm_80", "sm_90", "compute_90"]
    assert '-DRAPID_LLM_ARCHS="sm_80,sm_90,compute_90"' in compiled[-1]
    assert "-ltorch_cpu -ltorch" in linked


def test_an_editable_install_builds_in_place(checkout: Path, nvcc: dict[str, str]) -> None:
    """Catches: a library left in a folder that nothing looks into."""
    library = checkout / "rapid_llm" / aot.FILE
    packed(checkout, "build_editable", **nvcc, RAPID_LLM_BUILD_EXT="1")
    assert library.read_bytes() == Path(nvcc["LIBRARY"]).read_bytes()
    library.unlink()


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"RAPID_LLM_BUILD_EXT": "yes"}, "RAPID_LLM_BUILD_EXT='yes': use 1"),
        ({"RAPID_LLM_BUILD_EXT": "1", "CUDA_HOME": "/nowhere"}, "CUDA_HOME=/nowhere has no bin/nvcc"),
        ({"RAPID_LLM_BUILD_EXT": "1", "TORCH_CUDA_ARCH_LIST": "nine"}, "'nine' is no architecture"),
    ],
)
def test_what_cannot_be_built_says_why(checkout: Path, environment: dict[str, str], text: str) -> None:
    """Catches: a wheel without the extension that was asked for; a traceback instead of the cause."""
    done = pack(checkout, "build_wheel", **environment)
    assert done.returncode != 0
    assert text in done.stderr, done.stderr[-2000:]


def test_a_wheel_over_its_budget_is_refused_with_its_largest_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: [P73] a size that is seen by users first; a script that does not say what to cut."""
    wheel = tmp_path / "rapid_llm-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("rapid_llm/small.py", b"x" * 1000)
        archive.writestr("rapid_llm/big.bin", os.urandom(300_000))
    assert size_tool().main([str(wheel)]) == 0
    assert size_tool().main([str(wheel), "--budget", "0.2"]) == 1
    said = capsys.readouterr()
    assert "over the budget of 0.2 MB" in said.err
    assert said.out.index("rapid_llm/big.bin") < said.out.index("rapid_llm/small.py")
