"""The build engine that every compiled path shares: content keys, one compile per key, and a store that survives kills.

`build(unit, compiler)` returns an artifact from the store, or compiles it there. Nothing here imports torch, and
importing it starts nothing and writes nothing.
"""

from .arch import gencode, nvcc_arch
from .compilers import NVCC_FLAGS, GxxCompiler, NvccCompiler
from .engine import build, key_of, load_test_ctypes
from .errors import BuildError, BuildTimeout, CompileFailed, FrozenError, LockTimeout
from .facts import python_facts, torch_facts
from .freezing import counters, freeze, frozen, thaw, watch
from .resources import jobs
from .toolchain import Part, Toolchain, toolchain
from .unit import Artifact, Compiler, Unit

__all__ = [
    "NVCC_FLAGS",
    "Artifact",
    "BuildError",
    "BuildTimeout",
    "CompileFailed",
    "Compiler",
    "FrozenError",
    "GxxCompiler",
    "LockTimeout",
    "NvccCompiler",
    "Part",
    "Toolchain",
    "Unit",
    "build",
    "counters",
    "freeze",
    "frozen",
    "gencode",
    "jobs",
    "key_of",
    "load_test_ctypes",
    "nvcc_arch",
    "python_facts",
    "thaw",
    "toolchain",
    "torch_facts",
    "watch",
]
