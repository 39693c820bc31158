"""The extension for tests: the real one built once and left where it is looked for, and stand-ins with a fault each."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from rapid_llm.kernels import aot
from rapid_llm.kernels.build.toolchain import host_command

ROOT = aot.PACKAGE.parent
GOOD = "torch=2.11 headers=2.13.0 cuda=13.0 archs=sm_80,sm_90,compute_120 sources=0"


@cache
def builder() -> ModuleType:
    """csrc/build.py."""
    return _script("build")


@cache
def size_tool() -> ModuleType:
    """csrc/size.py."""
    return _script("size")


def _script(name: str) -> ModuleType:
    path = ROOT / "csrc" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"rapid_llm_csrc_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def built() -> Path:
    """The library, for every architecture that is shipped: as it is if it is of these sources, else compiled now."""
    build = builder()
    try:
        path: Path = build.build(archs=build.ARCHS)
    except build.BuildError as error:
        pytest.skip(f"the extension cannot be built here: {error}")
    return path


def stand_in(folder: Path, info: str = GOOD, body: str = "void* PyInit__C(void) { return 0; }") -> Path:
    """A library in `folder` that says `info` of itself and has the C code `body`."""
    command, problem = host_command()
    if problem:
        pytest.skip(f"a stand-in needs a compiler: {problem}")
    source, path = folder / "stand_in.cpp", folder / aot.FILE
    text = f'extern "C" {{ extern const char info[] = "RAPID_LLM_BUILD_INFO {info};"; {body} }}\n'
    source.write_text(text)
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run([*command, "-shared", "-fPIC", "-w", include, str(source), "-o", str(path)], check=True)
    return path
