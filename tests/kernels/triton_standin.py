"""Triton up to its compiler, which is a stand-in, over a GPU that is none: what would be compiled, and when."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from rapid_llm.kernels.ops import triton_support

DEVICE = 77


class Driver:
    """A GPU of SM 90 that nothing reaches."""

    def get_current_device(self) -> int:
        return DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class Compiled:
    """A kernel whose launch does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *args: object) -> None:
        return None

    def run(self, *args: object) -> None:
        return None


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put the stand-ins under every kernel of this package; returns the names of what is compiled, as it is."""
    from triton.runtime.driver import driver

    triton_support.load()  # kernels are kernels only then, where torch is built for no GPU
    made: list[str] = []
    monkeypatch.setattr(type(driver), "active", Driver())
    for kernel in _kernels():
        monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
        kernel.device_caches[DEVICE]  # makes the binder, which sets the compiler that is replaced here
        name = kernel.__name__
        monkeypatch.setattr(kernel, "compile", lambda *args, name=name, **kwargs: made.append(name) or Compiled())
    return made


def _kernels() -> list[Any]:
    from triton.runtime.jit import JITFunction

    modules = [m for name, m in sorted(sys.modules.items()) if name.startswith("rapid_llm.kernels.ops.")]
    found = {id(v): v for module in modules for v in vars(module).values() if isinstance(v, JITFunction)}
    return list(found.values())
