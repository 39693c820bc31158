"""The CUDA driver by ctypes: modules from cubins, and a launch that costs one `struct` pack and one foreign call.

A launch's configuration and arguments lie in one buffer, in C's layout, and go to the driver by one pointer each
(`cuLaunchKernelEx` with CU_LAUNCH_PARAM_BUFFER_POINTER). A buffer belongs to one launch at a time, so threads share
nothing. Every status is checked.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from ..registry import ArgumentError, KernelError
from ..registry.forking import Lock

LETTERS: Final = {"p": "Q", "l": "q", "i": "i", "u": "I", "f": "f", "t": "Qi4x"}
"""A kernel's signature has one letter a parameter: p pointer, l 64-bit, i and u 32-bit integer, f float, t a pointer
with an int (`AnyFloats`). `struct` aligns each as C does."""

# CUlaunchConfig: grid, block, shared bytes, (4 bytes) stream, attributes, their number; then up to 64, where arguments
# begin, a boundary that suits any of them.
_CONFIG: Final = "7IQQI4x8x"
_ARGUMENTS_AT: Final = struct.calcsize(_CONFIG)
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2
_INVALID_CONTEXT: Final = 201

Launch = Callable[..., None]


class CudaError(KernelError):
    """The driver refused: what was asked of it, the error's name, and its text."""


def signature_format(signature: str) -> str:
    """The `struct` format of a kernel's parameters."""
    return "".join(LETTERS[letter] for letter in signature)


class Driver:
    """libcuda. `library`: the loaded library, or a stand-in that has the same functions."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, int] = {}
        self._lock = Lock()
        self.launch_ex = library.cuLaunchKernelEx
        self.launch_ex.argtypes = [ctypes.c_void_p] * 4
        self._call("cuInit", 0)

    def context(self, index: int) -> int:
        """The primary context of a device, which is torch's; held as long as this process lives."""
        with self._lock:
            if index not in self._contexts:
                device, context = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuDeviceGet", ctypes.byref(device), index)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
                self._contexts[index] = context.value or 0
            return self._contexts[index]

    def functions(self, cubin: bytes, symbols: list[str], index: int) -> list[int]:
        """Handles of the kernels of a cubin, loaded on a device; whatever context is current stays so."""
        self._call("cuCtxPushCurrent_v2", ctypes.c_void_p(self.context(index)))
        try:
            module = ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), cubin)
            found = []
            for symbol in symbols:
                function = ctypes.c_void_p()
                self._call("cuModuleGetFunction", ctypes.byref(function), module, symbol.encode())
                found.append(function.value or 0)
            return found
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def make_current(self, index: int) -> None:
        """Make a device's primary context the calling thread's."""
        self._call("cuCtxSetCurrent", ctypes.c_void_p(self.context(index)))

    def explain(self, status: int) -> str:
        """An error's name and text."""
        texts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            getattr(self._library, name)(status, ctypes.byref(text))
            texts.append((text.value or b"error %d" % status).decode())
        return ": ".join(texts)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise CudaError(f"{name}: {self.explain(status)}")


def launcher(
    driver: Driver,
    function: int,
    label: str,
    signature: str,
    index: int,
    *,
    stream_of: Callable[[int], int],
    current: Callable[[], int],
    guard: Callable[[int], Any],
) -> Launch:
    """`launch(blocks, threads, rows, *arguments)` on device `index`: a grid of `blocks`, of `threads` x `rows` threads.

    It runs on the stream that `stream_of(index)` names; `guard(index)` is entered where `current()` is another device.
    Raises `CudaError` if the driver refuses, `ArgumentError` for numbers that C's types do not hold.
    """
    form = struct.Struct(f"{_CONFIG}{signature_format(signature)}")
    pack = form.pack_into
    call = driver.launch_ex
    free: list[tuple[Any, int, int, Any]] = []

    def held() -> tuple[Any, int, int, Any]:
        buffer = ctypes.create_string_buffer(form.size)
        start = ctypes.addressof(buffer)
        size = ctypes.c_size_t(form.size - _ARGUMENTS_AT)
        extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, start + _ARGUMENTS_AT, _BUFFER_SIZE, ctypes.addressof(size), None
        )
        return buffer, start, ctypes.addressof(extra), (size, extra)

    def refuse(status: int, blocks: int, threads: int, rows: int) -> None:
        raise CudaError(
            f"{label}: the launch of {blocks} blocks of {threads} x {rows} threads failed: {driver.explain(status)} "
            "(an earlier kernel's fault can show here; CUDA_LAUNCH_BLOCKING=1 tells)"
        )

    def launch(blocks: int, threads: int, rows: int, *arguments: Any) -> None:
        if current() != index:
            with guard(index):
                return launch(blocks, threads, rows, *arguments)
        try:
            slot = free.pop()
        except IndexError:  # the first launch, or one in each of several threads
            slot = held()
        stream = stream_of(index)
        try:
            pack(slot[0], 0, blocks, 1, 1, threads, rows, 1, 0, stream, 0, 0, *arguments)
        except OverflowError:  # a float beyond fp32 is an infinity there, as C's conversion has it
            arguments = tuple(ctypes.c_float(a).value if isinstance(a, float) else a for a in arguments)
            pack(slot[0], 0, blocks, 1, 1, threads, rows, 1, 0, stream, 0, 0, *arguments)
        except struct.error as error:
            raise ArgumentError(f"{label}: {blocks} blocks, arguments {arguments}: {error}") from error
        status = call(slot[1], function, None, slot[2])
        if status == _INVALID_CONTEXT:  # a thread in which nothing of CUDA ran yet
            driver.make_current(index)
            status = call(slot[1], function, None, slot[2])
        free.append(slot)
        if status:
            refuse(status, blocks, threads, rows)
        return None

    return launch


@cache
def driver() -> Driver:
    """The driver of this machine; raises OSError where there is none."""
    return Driver(ctypes.CDLL("libcuda.so.1"))


@cache
def why_no_driver() -> str:
    """Why libcuda does not load; empty if it does. Loading it touches no device."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    return ""
