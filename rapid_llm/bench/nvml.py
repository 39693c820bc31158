"""Clocks and the reasons for lowered ones, read through the driver's management library; nothing is ever set."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

from .device import Clocks

_SM: Final = 1
_MEMORY: Final = 2


@cache
def _library() -> Any:
    """The library, or None where it is missing or does not start."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # no driver here
        return None
    return library if library.nvmlInit_v2() == 0 else None


@cache
def _handle(uuid: str) -> Any:
    library = _library()
    handle = ctypes.c_void_p()
    if library is None or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
        return None
    return handle


def read_clocks(uuid: str) -> Clocks:
    """Of the GPU with this UUID (`GPU-...`); unknown where the library or the device does not tell."""
    handle = _handle(uuid)
    if handle is None:
        return Clocks()
    library = _library()
    reasons = ctypes.c_ulonglong()
    known = library.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons)) == 0
    return Clocks(_clock(handle, _SM), _clock(handle, _MEMORY), int(reasons.value) if known else None)


class _Use(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def read_use(uuid: str) -> int | None:
    """Percent of the last moment, up to a second long, in which a kernel of any program ran; None if it is unknown."""
    handle, found = _handle(uuid), _Use()
    if handle is None or _library().nvmlDeviceGetUtilizationRates(handle, ctypes.byref(found)) != 0:
        return None
    return int(found.gpu)


def _clock(handle: Any, which: int) -> int | None:
    value = ctypes.c_uint()
    status = _library().nvmlDeviceGetClockInfo(handle, which, ctypes.byref(value))
    return int(value.value) if status == 0 else None


def driver_version() -> str | None:
    """As the driver calls itself."""
    library = _library()
    text = ctypes.create_string_buffer(96)
    if library is None or library.nvmlSystemGetDriverVersion(text, 96) != 0:
        return None
    return text.value.decode()
