"""Compile what a native op would launch, for a GPU that is not here.

The op's wrapper runs over CPU tensors while its launches are recorded instead of made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rapid_llm.kernels.ops.tile_policy import assume_sm
from rapid_llm.kernels.ops.triton_support import record_launches


@dataclass(frozen=True)
class Launch:
    """One recorded launch and the compilation it asks for; launches with equal `key` compile to the same binary."""

    kernel: Any
    grid: tuple[int, ...]
    sm: int
    signature: dict[str, str]
    constexprs: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    options: dict[str, Any] = field(repr=False)

    @property
    def key(self) -> tuple[object, ...]:
        parts = (self.signature, self.constexprs, self.attrs, {k: self.options[k] for k in ("num_warps", "num_stages")})
        return (self.kernel.__module__, self.kernel.__name__, self.sm, *(repr(sorted(p.items())) for p in parts))


def record(sm: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Launch]:
    """The launches that `fn(*args, **kwargs)` makes on a GPU of version `sm`; its results are not computed."""
    raw: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
    record_launches(lambda *launch: raw.append(launch))
    try:
        with assume_sm(sm):
            fn(*args, **kwargs)
    finally:
        record_launches(None)
    return [_specialise(sm, *launch) for launch in raw]


def _specialise(sm: int, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> Launch:
    """What Triton's own launcher derives from the arguments: types, constants, divisibility, options."""
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(_target(sm))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    # Triton's own launch adds this default before it binds.
    bound, specialization, options = bind(*args, **{"debug": False, **meta})
    options, signature, constexprs, attrs = kernel._pack_args(
        backend, {"debug": False, **meta}, bound, specialization, options
    )
    return Launch(kernel, grid, sm, signature, constexprs, attrs, dict(vars(options)))


def compile_launch(launch: Launch) -> Any:
    """Compile down to a cubin for `launch.sm`; raises Triton's error, which names the source line."""
    import triton
    from triton.compiler import ASTSource

    source = ASTSource(launch.kernel, launch.signature, launch.constexprs, launch.attrs)
    compiled = triton.compile(source, target=_target(launch.sm), options=launch.options)
    if not compiled.asm["cubin"]:
        raise RuntimeError(f"{launch.kernel.__name__}: no cubin for sm_{launch.sm}")
    return compiled


def describe(launch: Launch) -> str:
    """One line for a test id or a failure."""
    types = ",".join(t for t in launch.signature.values() if t != "constexpr")
    constants = ",".join(f"{launch.kernel.arg_names[k[0]]}={v}" for k, v in launch.constexprs.items())
    source = inspect.getmodule(launch.kernel.fn)
    return f"{source.__name__ if source else '?'}:{launch.kernel.__name__} sm_{launch.sm} ({types}) [{constants}]"


def static_shared_memory(compiled: Any) -> int:
    """Bytes of shared memory of one program."""
    return int(compiled.metadata.shared)


def _target(sm: int) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", sm, 32)


SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory that one program may have, by SM version (CUDA C++ Programming Guide, compute capabilities)."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
