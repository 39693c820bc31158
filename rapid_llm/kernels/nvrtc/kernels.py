"""`Kernels`: the device functions of one op, compiled a dtype at a time and ready to launch on each device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rapid_llm import settings

from ..build import Artifact, BuildError, Unit, build, nvcc_arch
from ..build.extension import take
from ..registry import ArgumentError, KernelError, NotReadyError
from ..registry.forking import Lock
from . import libcuda
from .compiler import NAME, NvrtcCompiler, read
from .libcuda import Launch
from .libnvrtc import library

if TYPE_CHECKING:
    from ..registry.facts import Facts

SOURCES: Final = Path(__file__).parents[1] / "csrc"
MIN_SM: Final = 80
"""What the device helpers' conversions need."""

TYPES: Final = {"fp32": "float", "fp16": "rapid_llm::half_t", "bf16": "rapid_llm::bfloat16_t"}
"""The device helpers' types of the dtypes that the kernels take."""

VECTOR: Final = {"fp32": 4, "fp16": 8, "bf16": 8}
"""Elements in 16 bytes."""

FLAGS: Final = ("--std=c++17",)
"""IEEE arithmetic, no fast math; as nvcc compiles the same kernels."""

_LABELS: Final = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

Instances = Callable[[str], Mapping[Hashable, tuple[str, str]]]


class Kernels(dict[tuple[int, Any], Mapping[Hashable, Launch]]):
    """Launchers by device index and dtype: `kernels[input.get_device(), input.dtype][variant](blocks, threads, rows,
    *arguments)`.

    instances: of a dtype's label, each variant's template instance and its signature in `libcuda.LETTERS`. All those
    of a dtype are one unit, built or found, and loaded, on their first use: never in a CUDA graph's capture.
    """

    def __init__(
        self,
        name: str,
        source: str,
        instances: Instances,
        *,
        root: Path = SOURCES,
        include_dirs: tuple[Path, ...] = (),
    ) -> None:
        super().__init__()
        self.name = name
        self.source = root / source
        self.include_dirs = include_dirs or tuple(dict.fromkeys((root, SOURCES, SOURCES / "include")))
        self.instances = instances
        self._lock = Lock()

    def __missing__(self, key: tuple[int, Any]) -> Mapping[Hashable, Launch]:
        index, dtype = key
        if index < 0:
            raise ArgumentError(f"{self.name}: input must be a CUDA tensor")
        name = str(dtype).removeprefix("torch.")
        if name not in _LABELS:
            raise ArgumentError(f"{self.name}: {name} is not a dtype of this kernel; use float32, float16 or bfloat16")
        with self._lock:
            if key not in self.keys():
                self[key] = self._load(index, _LABELS[name])
            return self[key]

    def prepare(self, facts: Facts) -> None:
        """Build and load what a call with these facts runs; for `KernelSpec.prepare`."""
        import torch

        index = torch.cuda.current_device() if facts.index is None else facts.index
        for name, label in _LABELS.items():
            if facts.dtype in (label, None):
                self[index, getattr(torch, name)]

    def build(self, sm: int, dtype: str) -> Artifact:
        """The cubin for SM version `sm` and a dtype's label, found or compiled; needs no GPU."""
        if settings.jit() == "off":
            raise BuildError(f"nvrtc/{self.name}: RAPID_LLM_JIT=off: no kernel is compiled on this machine; unset it")
        if sm < MIN_SM:
            raise KernelError(f"{self.name}: NVRTC kernels need SM {MIN_SM} or newer, the tensor's device is SM {sm}")
        return build(self.unit(nvcc_arch(sm), dtype), NvrtcCompiler(library()), check=read)

    def unit(self, arch: str, dtype: str) -> Unit:
        """What is compiled for a dtype's label."""
        if not self.source.is_file():
            raise BuildError(f"nvrtc/{self.name}: there is no source {self.source}")
        if not arch.startswith("sm_"):
            raise BuildError(
                f"nvrtc/{self.name}: TORCH_CUDA_ARCH_LIST allows PTX only ({arch}) on this device, and NVRTC kernels "
                "are machine code; add the device's own architecture"
            )
        names = tuple(f"{NAME}{expression}" for expression, _ in self.instances(dtype).values())
        return Unit(
            path="nvrtc",
            name=f"{self.name}-{dtype}",
            source=self.source,
            output=f"{self.name}.cubin",
            flags=(*FLAGS, *names),
            include_dirs=self.include_dirs,
            arch=arch,
        )

    def _load(self, index: int, dtype: str) -> Mapping[Hashable, Launch]:
        import torch

        from ..ops.tile_policy import sm_version

        if torch.cuda.is_current_stream_capturing():
            raise NotReadyError(f"nvrtc/{self.name} is not loaded, and a CUDA graph is being captured")
        cubin, symbols = take(lambda: self.build(sm_version(torch.device("cuda", index)), dtype), read)
        wanted = self.instances(dtype)
        driver = libcuda.driver()
        handles = driver.functions(cubin, [symbols[name] for name, _ in wanted.values()], index)
        return {
            variant: libcuda.launcher(
                *(driver, handle, self.name, signature, index),
                stream_of=torch._C._cuda_getCurrentRawStream,
                current=torch._C._cuda_getDevice,
                guard=torch.cuda.device,
            )
            for (variant, (_, signature)), handle in zip(wanted.items(), handles, strict=True)
        }
