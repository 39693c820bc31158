"""JIT CUDA: a `.cu` of `csrc/` becomes an extension module on first use, and nothing of torch's C++ is compiled in.

The module reads tensors through torch's DLPack exchange API and Python through its limited API
(`csrc/include/rapid_llm/module.h`), so it depends on neither's version and neither is in its key; what is: source, own
headers, flags, nvcc, host compiler, CUDA version and architecture. The architecture is that of the tensor's device,
whichever it is, within what TORCH_CUDA_ARCH_LIST allows.

A module is built at dispatch's decision (`Kernel.prepare`) or at the first call, never while a CUDA graph is captured.
Sources that include torch's own headers are `torch.utils.cpp_extension.load`'s business; nothing here is in its way.
"""

from __future__ import annotations

import sysconfig
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from rapid_llm import settings
from rapid_llm.platform import has_nvidia

from .build import BuildError, NvccCompiler, Unit, build, nvcc_arch, toolchain
from .build.arch import arch_list
from .build.extension import import_extension, take
from .registry import ArgumentError, KernelError, NotReadyError
from .registry.forking import Lock
from .registry.probes import Probe

if TYPE_CHECKING:
    from .registry.facts import Facts

SOURCES: Final = Path(__file__).parent / "csrc"
INCLUDES: Final = (SOURCES, SOURCES / "include")
MIN_SM: Final = 80
"""What the device helpers' conversions need."""

_FACTS: Final = {"python": "abi3, 3.11 and later", "tensors": "DLPack exchange API 1"}
_OFF: Final = "RAPID_LLM_JIT=off: no kernel is compiled on this machine"
_lock: Final = Lock()
_Key = tuple[str, str, tuple[str, ...], str]
_modules: Final[dict[_Key, ModuleType]] = {}
_building: Final[defaultdict[_Key, Lock]] = defaultdict(Lock)
"""One a module, so that several are built at once."""
_kernels: Final[list[Kernel]] = []


def available() -> bool:
    """Whether CUDA kernels can be compiled and run here; `why_not()` says what is missing. Compiles nothing."""
    return why_not().ok


def why_not() -> Probe:
    """The first part of the path that is missing, with its fix."""
    if settings.jit() == "off":
        return Probe(False, _OFF, fix="unset RAPID_LLM_JIT")
    missing = _torch_missing()
    if missing is not None:
        return missing
    if not has_nvidia():
        return Probe(False, "no NVIDIA driver is loaded", fix="run where there is an NVIDIA GPU")
    for part in toolchain().parts:
        if not part.ok:
            return Probe(False, f"{part.name}: {part.text}", fix=part.fix)
    return Probe(True)


def load_jit(name: str, source: str, *, extra_cuda_cflags: tuple[str, ...] = ("-O3",)) -> ModuleType:
    """The module compiled from `csrc/<source>` for the current CUDA device, named `rapid_llm_jit_<name>`.

    Memoised on its arguments and the device's architecture. Without a device, the newest entry of TORCH_CUDA_ARCH_LIST
    decides. Raises `BuildError`, a RuntimeError, with the compiler's first error and the log's path, or with what is
    missing; `NotReadyError` while a CUDA graph is captured.
    """
    return _load(name, source, tuple(extra_cuda_cflags), _current_arch(name))


def forget() -> None:
    """Look at sources again from the next call on, for whoever edits them in a running process.

    A module in use stays in memory; the edited one has another key, so another file, and is loaded beside it.
    """
    with _lock:
        _modules.clear()
        for kernel in _kernels:
            kernel.clear()


class Kernel(dict[int, Callable[..., None]]):
    """A launcher by the index of a tensor's CUDA device: `kernel[input.get_device()](out, input, ...)`.

    A device's first use builds or loads the module for its architecture; every later one is a dictionary look-up.
    """

    def __init__(self, name: str, source: str, *, extra_cuda_cflags: tuple[str, ...] = ("-O3",)) -> None:
        super().__init__()
        self.name = name
        self.source = source
        self.flags = extra_cuda_cflags
        _kernels.append(self)

    def __missing__(self, index: int) -> Callable[..., None]:
        if index < 0:
            raise ArgumentError(f"{self.name}: needs CUDA tensors, and the first is not on a CUDA device")
        import torch

        from .ops.tile_policy import sm_version

        function = self._function(sm_version(torch.device("cuda", index)))
        self[index] = function
        return function

    def prepare(self, facts: Facts) -> None:
        """Build and load the module for the device that `facts` speak of; for `KernelSpec.prepare`."""
        if facts.sm is None:
            raise KernelError(f"{self.name}: the device's SM version is not known; run where the GPU is visible")
        self._function(facts.sm)

    def _function(self, sm: int) -> Callable[..., None]:
        if sm < MIN_SM:
            raise KernelError(f"{self.name}: JIT kernels need SM {MIN_SM} or newer, the tensor's device is SM {sm}")
        module = _load(self.name, self.source, self.flags, nvcc_arch(sm))
        function: Callable[..., None] = getattr(module, self.name)
        return function


def _load(name: str, source: str, flags: tuple[str, ...], arch: str) -> ModuleType:
    key = (name, source, flags, arch)
    with _building[key]:
        module = _modules.get(key)
        if module is None:
            module = _modules[key] = _build(name, source, flags, arch)
        return module


def _build(name: str, source: str, flags: tuple[str, ...], arch: str) -> ModuleType:
    """Find or compile the module, and import it."""
    if settings.jit() == "off":
        raise BuildError(f"jit/{name}: {_OFF}; unset it")
    if _capturing():
        raise NotReadyError(f"jit/{name} is not loaded, and a CUDA graph is being captured")
    tools = toolchain()
    if not tools.ok:
        raise BuildError(f"jit/{name}: the CUDA toolkit cannot be used: {tools.reason()}")
    if not tools.compiles_for(arch):
        known = ", ".join(tools.archs)
        raise BuildError(f"jit/{name}: nvcc {tools.part('nvcc').text} does not compile for {arch}, only for {known}")
    unit = _unit(name, source, flags, arch)
    return take(lambda: build(unit, NvccCompiler(tools)), lambda path: import_extension(f"rapid_llm_jit_{name}", path))


def _unit(name: str, source: str, flags: tuple[str, ...], arch: str) -> Unit:
    path = SOURCES / source
    if not path.is_file():
        raise BuildError(f"jit/{name}: there is no source {path}")
    # Hidden: an inline variable of one module is not to be the same as that of another, built from other headers.
    own = ("-std=c++17", "-Xcompiler", "-fvisibility=hidden", f"-DRAPID_LLM_MODULE_NAME=rapid_llm_jit_{name}")
    return Unit(
        path="jit",
        name=name,
        source=path,
        output=f"{name}.abi3.so",
        flags=(*own, *flags),
        include_dirs=INCLUDES,
        system_dirs=(Path(sysconfig.get_path("include")),),
        arch=arch,
        facts=_FACTS,
    )


def _current_arch(name: str) -> str:
    torch = _torch()
    if torch is not None and torch.cuda.is_available():
        from .ops.tile_policy import sm_version

        return nvcc_arch(sm_version())
    listed = arch_list()
    if listed:
        return max(listed, key=lambda entry: (entry.sm, entry.suffix)).code
    missing = toolchain().reason()
    if missing:
        raise BuildError(f"jit/{name}: the CUDA toolkit cannot be used: {missing}")
    raise BuildError(f"jit/{name}: no CUDA device is visible; set TORCH_CUDA_ARCH_LIST to compile without one")


def _capturing() -> bool:
    torch = _torch()
    return torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _torch_missing() -> Probe | None:
    torch = _torch()
    if torch is None:
        return Probe(False, "torch is not installed", installed=False)
    if torch.version.cuda is None:
        return Probe(False, "this torch is built without CUDA", fix="install a torch built for CUDA")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        text = f"torch {torch.__version__} has no DLPack exchange API (torch.Tensor.__dlpack_c_exchange_api__)"
        return Probe(False, text, fix="install torch 2.11 or later")
    return None


def _torch() -> Any:
    """torch, or None where it is not installed; imported by whoever asks first, never by this module's import."""
    try:
        import torch
    except ImportError:
        return None
    return torch
