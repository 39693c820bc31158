"""Everything that native rows share about Triton: whether it can be used here, one launch door, and the fall to PyTorch.

The floor cannot fail: where Triton is absent or cannot build a kernel (no C compiler, no Python.h, a read-only cache), the
native row of that op answers through PyTorch, and the reason is kept for `explain()`. Errors of a launch itself (out of
memory, an illegal address) are never caught.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from rapid_llm.kernels.registry import notes

_log = logging.getLogger(__name__)

MAX_GRID_YZ = 65_535
"""CUDA's limit on grid[1] and grid[2]."""


class _Missing:
    """Stands for `triton` and `triton.language` where Triton is absent: decorators pass through, nothing launches."""

    def __getattr__(self, name: str) -> Any:
        return _Missing()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Missing()


try:
    import triton
    import triton.language as tl
    from triton.runtime.errors import OutOfResources

    MISSING_REASON = ""
    _BUILD_ERRORS: tuple[type[BaseException], ...] = (
        triton.CompilationError,
        OutOfResources,
        subprocess.CalledProcessError,
        OSError,
        ImportError,
    )
except Exception as error:  # any failure of a foreign import means "no Triton here"; the text is kept
    triton = tl = _Missing()
    MISSING_REASON = f"{type(error).__name__}: {error}"
    _BUILD_ERRORS = ()

INTERPRETED = not MISSING_REASON and os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter is on: CPU tensors take the Triton path, for tests."""

_recorder: Callable[..., None] | None = None
_broken: dict[str, str] = {}


def use_triton(op: str, tensor: torch.Tensor) -> bool:
    """Whether `op` runs its Triton kernel for this tensor; False on CPU, without Triton, or once a build failed."""
    if not (tensor.is_cuda or INTERPRETED or _recorder is not None):
        return False
    if MISSING_REASON:
        _fall(op, f"Triton cannot be imported: {MISSING_REASON}")
    return op not in _broken


def attempt(op: str, run: Callable[..., None], *args: Any) -> bool:
    """Run `run(*args)`, which launches kernels; False (and a note) if Triton cannot build them on this machine."""
    try:
        run(*args)
    except _BUILD_ERRORS as error:
        _fall(op, f"Triton cannot build its kernel: {type(error).__name__}: {str(error)[:500]}")
        return False
    except RuntimeError as error:
        if "C compiler" not in str(error):  # Triton's plain RuntimeError where no cc is found
            raise
        _fall(op, f"Triton cannot build its kernel: {error}")
        return False
    return True


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **meta: Any) -> None:
    """Launch `kernel[grid](*args, **meta)` on `device`; an empty grid launches nothing."""
    if 0 in grid:
        return
    if any(n > MAX_GRID_YZ for n in grid[1:]):
        raise ValueError(f"{kernel.__name__}: grid {grid} exceeds {MAX_GRID_YZ} in its second or third axis")
    if _recorder is not None:
        _recorder(kernel, grid, args, meta)
    elif device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **meta)
    else:
        kernel[grid](*args, **meta)


def record_launches(recorder: Callable[..., None] | None) -> None:
    """Send launches to `recorder(kernel, grid, args, meta)` instead of a device, CPU tensors included; None ends it."""
    global _recorder
    _recorder = recorder


def _fall(op: str, reason: str) -> None:
    if op not in _broken:
        _broken[op] = reason
        notes.add(f"native/{op}", reason)
        _log.warning("native/%s answers through PyTorch on this device. %s", op, reason)
