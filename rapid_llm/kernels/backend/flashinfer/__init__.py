"""flashinfer: what is called of it, and whether it can be used here.

Importing this package imports neither flashinfer nor torch. Each adapter is a module of its own that looks up its
functions when it is imported, so that a function renamed upstream costs one row and not all of them.

flashinfer compiles its kernels on first use, with nvcc and ninja, unless its package of prebuilt kernels is installed;
the probe therefore asks for these tools as well.
"""

from __future__ import annotations

import importlib.machinery
import os
import shutil
from typing import Final

from rapid_llm.kernels.backend._library import Call, Library, Recipe
from rapid_llm.kernels.registry.probes import Probe

PREBUILT: Final = "flashinfer_jit_cache"
"""The package of prebuilt kernels; with it no compiler is needed."""

_DECODE: Final = "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper"
_PREFILL: Final = "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper"
_PAGES: Final = ("num_qo_heads", "num_kv_heads")
_SETUP: Final = ("sm_scale", "q_data_type", "kv_data_type")

LIBRARY: Final = Library(
    module="flashinfer",
    distributions=("flashinfer-python",),
    minimum="0.6.7",
    below="0.7",
    recipe=Recipe(
        command="pip install 'flashinfer-python>=0.6.7,<0.7'",
        url="https://docs.flashinfer.ai/installation.html",
        notes=("compiles on first use: needs nvcc, ninja and a C++ compiler, or the package flashinfer-jit-cache",),
    ),
    calls={
        "rmsnorm": Call("flashinfer.norm:rmsnorm", ("input", "weight"), ("eps", "out")),
        "fused_add_rmsnorm": Call("flashinfer.norm:fused_add_rmsnorm", ("input", "residual", "weight"), ("eps",)),
        "silu_and_mul": Call("flashinfer.activation:silu_and_mul", ("input",), ("out",)),
        "rope": Call(
            "flashinfer.rope:apply_rope_with_cos_sin_cache_inplace",
            keywords=("positions", "query", "key", "head_size", "cos_sin_cache", "is_neox"),
        ),
        "decode": Call(_DECODE, ("float_workspace_buffer", "kv_layout"), ("use_tensor_cores", "backend")),
        "decode.plan": Call(
            f"{_DECODE}.plan",
            ("indptr", "indices", "last_page_len"),
            (*_PAGES, "head_dim", "page_size", *_SETUP),
        ),
        "decode.run": Call(f"{_DECODE}.run", ("q", "paged_kv_cache"), ("out",)),
        "prefill": Call(_PREFILL, ("float_workspace_buffer", "kv_layout"), ("backend",)),
        "prefill.plan": Call(
            f"{_PREFILL}.plan",
            ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
            (*_PAGES, "head_dim_qk", "page_size", "causal", *_SETUP),
        ),
        "prefill.run": Call(f"{_PREFILL}.run", ("q", "paged_kv_cache"), ("out",)),
        "top_k": Call("flashinfer.sampling:top_k_mask_logits", ("logits", "top_k")),
        "top_p": Call("flashinfer.sampling:top_p_renorm_probs", ("probs", "top_p"), ("is_deterministic",)),
    },
)


def available() -> Probe:
    """Whether flashinfer is installed, of a version that is called here, importable, and able to run and to build."""
    found = LIBRARY.probe()
    if not found.ok:
        return found
    for text, fix in (cuda_problem(), toolchain_problem()):
        if text:
            return Probe(False, text, fix=fix)
    return found


def cuda_problem() -> tuple[str, str]:
    """(why torch has no GPU for it, the fix); empty texts where it has one. Creates no CUDA context."""
    import torch

    if torch.version.cuda is None:
        return "flashinfer needs CUDA, and this torch is built without it", "install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "flashinfer needs an NVIDIA GPU, and torch sees none", "run where nvidia-smi -L lists a GPU"
    return "", ""


def toolchain_problem() -> tuple[str, str]:
    """(which tool flashinfer lacks to build its kernels, the fix), looked up as flashinfer does; nothing is run."""
    if importlib.machinery.PathFinder.find_spec(PREBUILT) is not None:
        return "", ""
    prebuilt = "or install flashinfer-jit-cache, which needs no compiler"
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        text = "FLASHINFER_DISABLE_JIT is set and flashinfer's prebuilt kernels are not installed"
        return text, f"unset FLASHINFER_DISABLE_JIT, {prebuilt}"
    nvcc = os.environ.get("FLASHINFER_NVCC") or os.path.join(_cuda_home(), "bin", "nvcc")
    if shutil.which(nvcc) is None:
        return f"flashinfer compiles on first use, and {nvcc} is no compiler", f"set CUDA_HOME, {prebuilt}"
    if shutil.which("ninja") is None:
        return "flashinfer compiles on first use with ninja, which is not on PATH", f"pip install ninja, {prebuilt}"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"flashinfer compiles on first use, and {compiler} is not on PATH", f"install g++ or set CXX, {prebuilt}"
    return "", ""


def _cuda_home() -> str:
    """The toolkit that flashinfer will take."""
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if given:
        return given
    nvcc = shutil.which("nvcc")
    return os.path.dirname(os.path.dirname(nvcc)) if nvcc else "/usr/local/cuda"
