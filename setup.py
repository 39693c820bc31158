"""A pure-Python install; with RAPID_LLM_BUILD_EXT=1 one with the CUDA extension `rapid_llm._C`.

Everything else is in pyproject.toml. The extension is built by csrc/build.py, which needs an installed torch, so:
`RAPID_LLM_BUILD_EXT=1 pip install --no-build-isolation .`
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
TRUTH = {"": False, "0": False, "1": True}


def builder() -> ModuleType:
    """csrc/build.py, under a name that no installed package has."""
    spec = importlib.util.spec_from_file_location("rapid_llm_csrc_build", ROOT / "csrc" / "build.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{ROOT}/csrc/build.py cannot be read")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildExtension(build_ext):
    """Hands the whole extension to csrc/build.py: setuptools' own compiler knows nothing of nvcc."""

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = builder()
        try:
            build.build(output)
        except build.BuildError as error:
            raise SystemExit(f"RAPID_LLM_BUILD_EXT=1: {error}") from None


def with_extension() -> dict[str, Any]:
    """What setup() is told where the extension is asked for."""
    sources = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.c[uc]"))
    return {
        "ext_modules": [Extension("rapid_llm._C", sources, py_limited_api=True)],
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
    }


wanted = os.environ.get("RAPID_LLM_BUILD_EXT", "").strip()
if wanted not in TRUTH:
    raise SystemExit(f"RAPID_LLM_BUILD_EXT={wanted!r}: use 1 to build the CUDA extension, 0 or nothing for pure Python")
setup(**with_extension() if TRUTH[wanted] else {})
