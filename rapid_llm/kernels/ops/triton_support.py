"""What native rows share about Triton: whether it can be used here, one launch door, and the fall to PyTorch.

The floor cannot fail: where Triton is absent or cannot build a kernel (no C compiler, no Python.h, an old driver), the
native row of that op answers through PyTorch, and the reason is kept for `explain()`. Errors of a launch itself (out of
memory, an illegal address) are never caught.

While a CUDA graph is captured, and after `rapid_llm.kernels.freeze()`, a kernel that this process has not loaded is not
compiled: that call goes through PyTorch, aloud, or is an error if RAPID_LLM_STRICT is set.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from rapid_llm import settings
from rapid_llm.kernels.build import FrozenError, counters, frozen
from rapid_llm.kernels.ops import deferred_triton
from rapid_llm.kernels.registry import NotReadyError, StrictFallbackError, UnknownOpError, notes, rows, trace
from rapid_llm.kernels.registry.capture import capturing
from rapid_llm.kernels.registry.forking import Lock

_log = logging.getLogger(__name__)

MAX_GRID_X = 2**31 - 1
"""CUDA's limit on grid[0]."""

MAX_GRID_YZ = 65_535
"""CUDA's limit on grid[1] and grid[2]."""


class _Missing:
    """Stands for `triton` and `triton.language` where Triton is absent: kernels can be declared, nothing launches."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # introspection (inspect, copy, pickle, doctest) must not take this for anything
            raise AttributeError(name)
        return _Missing()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a decorator, with or without arguments, hand back the function; as anything else, another stand-in."""
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Missing()


MISSING_REASON = ""
INTERPRETED = False
_TOO_BIG: tuple[type[BaseException], ...] = ()
_BUILD_ERRORS: tuple[type[BaseException], ...] = ()
_next_hook: Any = None

# `INTERPRETED`: Triton's interpreter is on (TRITON_INTERPRET=1); CPU tensors take the Triton path, for tests.

_BUILD_TEXTS = ("C compiler", "PTX", "no kernel image", "kernel image is invalid", "active drivers", "libcuda.so")
"""Parts of the plain RuntimeErrors and AssertionErrors by which Triton says that it cannot build or load here."""

_HOST_BOUND = ("attention.prefill",)
"""Ops whose PyTorch path on a GPU reads tensors on the host, so that no CUDA graph can capture it."""

_PACKAGE = __name__.partition(".")[0] + "."

_recorders: dict[int, Callable[..., None]] = {}
"""By thread, so that a rehearsal takes nobody else's launches."""

_waits = False
"""Whether Triton is still to be imported."""

_importing = Lock()

_broken: dict[str, str] = {}
_moved_cache: list[str] = []


def use_triton(op: str, tensor: torch.Tensor) -> bool:
    """Whether `op` runs its Triton kernel for this tensor; False on CPU, without Triton, or once a build failed."""
    if not (tensor.is_cuda or INTERPRETED or (_recorders and threading.get_ident() in _recorders)):
        return False
    if _waits:
        load()
    if MISSING_REASON and op not in _broken:
        _fall(op, f"Triton cannot be imported: {MISSING_REASON}")
    return op not in _broken


def broken() -> Mapping[str, str]:
    """Ops whose Triton path is off in this process, with the reason."""
    return MappingProxyType(_broken)


def attempt(op: str, run: Callable[..., None], *args: Any) -> bool:
    """Run `run(*args)`, which launches kernels; False (and a note) if Triton cannot build them on this machine.

    A build fails before its launch does anything, so an in-place op of one launch can then be done by PyTorch. One of
    several launches must not change its arguments before the last kernel is built.
    """
    try:
        run(*args)
    except NotReadyError as error:
        _refuse(op, error)
        return False
    except Exception as error:
        if not (isinstance(error, _BUILD_ERRORS) or _says_build(error)):
            raise
        if isinstance(error, OSError) and _move_cache(op, error):
            return attempt(op, run, *args)
        reason = f"Triton cannot build its kernel: {type(error).__name__}: {str(error)[:500]}"
        _fall(op, reason, this_call_only=isinstance(error, _TOO_BIG))
        return False
    return True


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **meta: Any) -> None:
    """Launch `kernel[grid](*args, **meta)` on `device`; an empty grid launches nothing."""
    if 0 in grid:
        return
    if grid[0] > MAX_GRID_X or (len(grid) > 1 and max(grid[1:]) > MAX_GRID_YZ):
        raise ValueError(f"{kernel.__name__}: grid {grid} exceeds CUDA's limits ({MAX_GRID_X}, then {MAX_GRID_YZ})")
    if isinstance(kernel, deferred_triton.Kernel):  # held under another name than its own module's
        load()
        kernel = kernel.real
    index = device.index
    recorder = _recorders.get(threading.get_ident()) if _recorders else None
    if recorder is not None:
        recorder(kernel, grid, args, meta)
    elif index is None or index == torch.cuda.current_device():
        kernel[grid](*args, **meta)
    else:
        with torch.cuda.device(device):
            kernel[grid](*args, **meta)


def record_launches(recorder: Callable[..., None] | None) -> None:
    """Send this thread's launches to `recorder(kernel, grid, args, meta)` instead of a device, CPU tensors included;
    None ends it."""
    if recorder is None:
        _recorders.pop(threading.get_ident(), None)
    else:
        load()
        _recorders[threading.get_ident()] = recorder


def before_build(*, fn: Any, **told: Any) -> Any:
    """Triton's hook on a kernel that this process has not loaded: count it, or refuse it where none may be built now.

    Kernels of other packages are their own business. Raises `NotReadyError`, of which `FrozenError` is one.
    """
    if str(fn.module).startswith(_PACKAGE):
        if frozen():
            raise FrozenError(f"kernel {fn.name} is not loaded for arguments of this kind, and kernels are frozen")
        if capturing():
            raise NotReadyError(f"kernel {fn.name} is not loaded, and a CUDA graph is being captured")
        counters.count("kernels")
    return None if _next_hook is None else _next_hook(fn=fn, **told)


def _install_hook() -> Any:
    """Put `before_build` in front of whatever hook there is, and return that."""
    following = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = before_build
    return following


def load() -> None:
    """Import Triton, unless that was tried, and make kernels of what waited for it."""
    global triton, tl, MISSING_REASON, INTERPRETED, _TOO_BIG, _BUILD_ERRORS, _next_hook, _waits
    with _importing:
        if not _waits:
            return
        try:
            import triton
            import triton.language as tl
            from triton.runtime.errors import OutOfResources, PTXASError

            INTERPRETED = triton.knobs.runtime.interpret
            _TOO_BIG = (OutOfResources,)
            _BUILD_ERRORS = (
                *(triton.CompilationError, OutOfResources, PTXASError),
                *(subprocess.CalledProcessError, OSError, ImportError),
            )
            _next_hook = _install_hook()
            deferred_triton.settle(triton)
        except Exception as error:  # any failure of a foreign import means "no Triton here"; the text is kept
            triton = tl = _Missing()
            MISSING_REASON = f"{type(error).__name__}: {error}"
            INTERPRETED = False
            deferred_triton.settle(None)
        _waits = False


def _may_wait() -> bool:
    """Whether nothing needs Triton yet: this torch is built for no GPU, and Triton's interpreter is off."""
    no_gpu = torch.version.cuda is None and torch.version.hip is None
    return (
        no_gpu
        and os.environ.get("TRITON_INTERPRET", "0") in ("", "0")
        and importlib.util.find_spec("triton") is not None
    )


triton: Any = deferred_triton.Name("triton")
tl: Any = deferred_triton.Name("triton", "language")
_waits = True
if not _may_wait():
    load()


def _says_build(error: Exception) -> bool:
    return isinstance(error, (RuntimeError, AssertionError)) and any(text in str(error) for text in _BUILD_TEXTS)


def _move_cache(op: str, error: OSError) -> bool:
    """Give Triton a private cache after the first failure to use its own (a read-only home, a full or foreign disk)."""
    if _moved_cache:
        return False
    try:
        private = tempfile.mkdtemp(prefix="rapid_llm-triton-")
    except OSError:
        return False
    _moved_cache.append(private)
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    text = f"Triton's cache {triton.knobs.cache.dir} cannot be used ({error}); kernels are rebuilt in each process"
    triton.knobs.cache.dir = private
    _note(op, text)
    _log.warning("%s. Set TRITON_CACHE_DIR to a folder that can be written.", text)
    return True


def _fall(op: str, reason: str, *, this_call_only: bool = False) -> None:
    if settings.strict():
        raise StrictFallbackError(f"native/{op} would answer through PyTorch, and RAPID_LLM_STRICT is set. {reason}")
    if not this_call_only:
        _broken[op] = reason
    if _note(op, reason):
        _log.warning("native/%s answers through PyTorch on this device. %s", op, reason)


def _refuse(op: str, error: NotReadyError) -> None:
    """This call goes through PyTorch, because its kernel must not be built now; an error where it cannot or may not."""
    if settings.strict():
        error.add_note(f"native/{op} would answer through PyTorch, and RAPID_LLM_STRICT is set")
        raise error
    if op in _HOST_BOUND and capturing():
        error.add_note(f"native/{op} cannot answer through PyTorch here: that path cannot be captured. Call it before")
        raise error
    trace.fell(op, f"native/{op}")
    if _note(op, str(error)):
        _log.warning("native/%s answers through PyTorch: %s. Prepare it earlier: see prepare()", op, error)


def _note(op: str, text: str) -> bool:
    """Keep `text` for the op's native rows; False if it was there."""
    try:
        native = [row.name for row in rows(op) if row.is_native]
    except UnknownOpError:
        native = [f"native/{op}"]
    new = any(text not in notes.of(name) for name in native)
    for name in native:
        notes.add(name, text)
    return new
