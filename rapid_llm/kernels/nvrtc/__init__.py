"""NVRTC: an op's device code (`csrc/<group>/<op>.cuh`, shared with the JIT path) without nvcc or a host compiler.

libnvrtc compiles it to a cubin in a fraction of a second, the build engine keeps it, the CUDA driver loads and launches
it. Checks and the choice of a variant are Python's, in `ops/<group>/<op>_nvrtc.py`.
"""

from __future__ import annotations

from rapid_llm import settings
from rapid_llm.platform import has_nvidia

from ..registry.probes import Probe
from .compiler import NvrtcCompiler
from .kernels import SOURCES, TYPES, VECTOR, Kernels
from .libcuda import CudaError, why_no_driver
from .libnvrtc import Library, library

__all__ = [
    "SOURCES",
    "TYPES",
    "VECTOR",
    "CudaError",
    "Kernels",
    "Library",
    "NvrtcCompiler",
    "available",
    "library",
    "why_not",
]


def available() -> bool:
    """Whether kernels can be compiled by NVRTC and run here; `why_not()` says what is missing. Compiles nothing."""
    return why_not().ok


def why_not() -> Probe:
    """The first part of the path that is missing, with its fix."""
    if settings.jit() == "off":
        return Probe(False, "RAPID_LLM_JIT=off: no kernel is compiled on this machine", fix="unset RAPID_LLM_JIT")
    try:
        import torch
    except ImportError:
        return Probe(False, "torch is not installed", installed=False)
    if torch.version.cuda is None:
        return Probe(False, "this torch is built without CUDA", fix="install a torch built for CUDA")
    if not has_nvidia():
        return Probe(False, "no NVIDIA driver is loaded", fix="run where there is an NVIDIA GPU")
    if reason := why_no_driver():
        return Probe(False, f"libcuda: {reason}", fix="install the driver's libcuda.so.1 where the linker finds it")
    if torch.cuda.device_count() == 0:  # asks NVML, so that a process may still fork
        return Probe(False, "no CUDA device is visible", fix="look at CUDA_VISIBLE_DEVICES")
    if reason := library().reason:
        return Probe(False, f"NVRTC: {reason}", fix="pip install nvidia-cuda-nvrtc, of torch's CUDA version")
    return Probe(True)
