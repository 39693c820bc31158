"""Every `.cu` of the package compiles for sm_80 and sm_90, host and device, with no GPU at hand.

Catches: a kernel that only one architecture accepts, a warning, registers that spill to memory, an instantiation that
nothing here runs, a source that is not ASCII, and a Python door that does not find its launcher.
"""

from __future__ import annotations

import concurrent.futures
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from rapid_llm.kernels import jit
from rapid_llm.kernels.build import gencode, jobs, toolchain

pytestmark = pytest.mark.compiles

UNITS = sorted(jit.SOURCES.rglob("*.cu"))
ARCHS = ("sm_80", "sm_90")
BYTES_A_JOB = 1 << 30

Done = concurrent.futures.Future["subprocess.CompletedProcess[str]"]


def _name(path: Path) -> str:
    return path.relative_to(jit.SOURCES).as_posix()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Path, Done]]:
    """Every unit's compile, all under way at once as far as cores and memory allow."""
    tools = toolchain()
    missing = tools.reason("nvcc", "host compiler", "CUDA headers", "Python.h", "architectures")
    if missing:
        pytest.skip(f"nothing can be compiled here: {missing}")
    folder = tmp_path_factory.mktemp("objects")
    with concurrent.futures.ThreadPoolExecutor(jobs(BYTES_A_JOB)) as pool:
        yield {unit: pool.submit(_compile, unit, folder / f"{unit.stem}.o") for unit in UNITS}


def _compile(source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    """One nvcc for all architectures, with the flags of `load_jit` and every warning an error."""
    unit = jit._unit(source.stem, _name(source), ("-O3",), "")
    includes = [word for folder in (*unit.include_dirs, sysconfig.get_path("include")) for word in ("-I", str(folder))]
    archs = [word for arch in ARCHS for word in gencode(arch)]
    strict = ["-Werror", "all-warnings", "-Xcompiler", "-Wall", "-Xptxas", "-v", "--threads", "2"]
    command = [str(toolchain().nvcc), "-c", "-Xcompiler", "-fPIC", *archs, *unit.flags, *strict, *includes]
    return subprocess.run([*command, str(source), "-o", str(output)], capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("unit", UNITS, ids=_name)
def test_compiles_without_a_warning_or_a_spill(unit: Path, compiled: dict[Path, Done]) -> None:
    """Catches: see the module; a spill is a slow kernel that still answers right."""
    done = compiled[unit].result()
    said = done.stderr + done.stdout
    assert done.returncode == 0, said[-4000:]
    assert "Compiling entry function" in said, "no kernel was compiled"
    for arch in ARCHS:
        assert f"for '{arch}'" in said, f"nothing was compiled for {arch}"
    kernels = re.split(r"Compiling entry function '", said)[1:]
    spilling = [k.partition("'")[0] for k in kernels if re.search(r"[1-9]\d* bytes spill", k)]
    assert not spilling, f"registers spill in {spilling}"


def test_every_jit_source_is_ascii() -> None:
    """Catches: a character that a host compiler of another locale refuses."""
    sources = [p for p in jit.SOURCES.rglob("*") if p.suffix in (".cu", ".cuh", ".h", ".cpp")]
    assert sources
    assert [_name(p) for p in sources if not p.read_bytes().isascii()] == []


def test_every_unit_is_a_module_with_functions() -> None:
    """Catches: a `.cu` without a Python door, or with an empty one."""
    for unit in UNITS:
        door = re.search(r"RAPID_LLM_MODULE\((.*?)\)\s*$", unit.read_text(), re.DOTALL)
        assert door is not None, f"{_name(unit)} defines no module"
        assert "RAPID_LLM_FUNCTION(" in door[1], f"{_name(unit)} offers no function"
