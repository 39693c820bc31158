"""DeepGEMM: fp8 GEMMs with block scales for Hopper, compiled at run time. Serves `linear` of scheme fp8_block128."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from rapid_llm.kernels.backend._library import Call, Library, Recipe
from rapid_llm.kernels.registry.probes import Probe

RECIPE: Final = Recipe(
    command="pip install --no-build-isolation 'git+https://github.com/deepseek-ai/DeepGEMM.git'",
    url="https://github.com/deepseek-ai/DeepGEMM",
    notes=(
        "needs a GPU of SM 90, torch with CUDA, a CUDA toolkit from 12.9 on and a C++20 compiler",
        "pip fetches its submodules",
    ),
)

LIBRARY: Final = Library(
    module="deep_gemm",
    distributions=("deep_gemm",),
    minimum="2.0",
    below="3",
    recipe=RECIPE,
    calls=MappingProxyType({"fp8_gemm_nt": Call("deep_gemm:fp8_gemm_nt", positional=("a", "b", "d"))}),
)


def available() -> Probe:
    """Whether DeepGEMM is here, of a version that is taken, and imports in a child process."""
    return LIBRARY.probe()
