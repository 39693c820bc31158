"""A stand-in for libcuda whose functions are C function pointers: it reads what a launch passes as the driver would."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

_CONFIG: Final = struct.Struct("=7I4xQQI4x")
_P: Final = ctypes.c_void_p


@dataclass(frozen=True)
class Launched:
    """What one launch passed."""

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    attributes: tuple[int, int]
    arguments: bytes


@dataclass
class FakeCuda:
    """fails: by function's name, the statuses that its next calls return before they succeed."""

    fails: dict[str, list[int]] = field(default_factory=dict)
    launches: list[Launched] = field(default_factory=list)
    contexts: list[tuple[str, int]] = field(default_factory=list)
    cubins: list[bytes] = field(default_factory=list)
    symbols: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._kept = {
            "cuInit": self._make("cuInit", lambda flags: None, ctypes.c_uint),
            "cuDeviceGet": self._make("cuDeviceGet", self._device, _P, ctypes.c_int),
            "cuDevicePrimaryCtxRetain": self._make("cuDevicePrimaryCtxRetain", self._retain, _P, ctypes.c_int),
            "cuCtxPushCurrent_v2": self._make("cuCtxPushCurrent_v2", lambda c: self._context("push", c), _P),
            "cuCtxPopCurrent_v2": self._make("cuCtxPopCurrent_v2", lambda c: self._context("pop", 0), _P),
            "cuCtxSetCurrent": self._make("cuCtxSetCurrent", lambda c: self._context("set", c), _P),
            "cuModuleLoadData": self._make("cuModuleLoadData", self._load, _P, ctypes.c_char_p),
            "cuModuleGetFunction": self._make("cuModuleGetFunction", self._function, _P, _P, ctypes.c_char_p),
            "cuLaunchKernelEx": self._make("cuLaunchKernelEx", self._launch, _P, _P, _P, _P),
            "cuGetErrorName": self._make("cuGetErrorName", lambda s, out: _text(out, b"CUDA_ERROR_%d" % s), int, _P),
            "cuGetErrorString": self._make("cuGetErrorString", lambda s, out: _text(out, b"it is Monday"), int, _P),
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            return self._kept[name]
        raise AttributeError(name)

    def _make(self, name: str, body: Callable[..., None], *types: Any) -> Any:
        def called(*arguments: Any) -> int:
            statuses = self.fails.get(name)
            if statuses:
                return statuses.pop(0)
            body(*arguments)
            return 0

        kinds = [ctypes.c_int if t is int else t for t in types]
        return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(called)

    def _device(self, out: int, index: int) -> None:
        ctypes.c_int.from_address(out).value = index

    def _retain(self, out: int, device: int) -> None:
        _P.from_address(out).value = 0xC0 + device

    def _context(self, what: str, context: int) -> None:
        self.contexts.append((what, context or 0))

    def _load(self, out: int, cubin: bytes) -> None:
        self.cubins.append(cubin)
        _P.from_address(out).value = 0x3000

    def _function(self, out: int, module: int, symbol: bytes) -> None:
        self.symbols.append(symbol.decode())
        _P.from_address(out).value = 0xF000 + len(self.symbols)

    def _launch(self, config: int, function: int, parameters: int | None, extra: int) -> None:
        *seven, stream, attributes, number = _CONFIG.unpack(ctypes.string_at(config, _CONFIG.size))
        one, pointer, two, size, end = (_P * 5).from_address(extra)
        assert (parameters, one, two, end) == (None, 1, 2, None)
        held = ctypes.string_at(pointer, ctypes.c_size_t.from_address(size).value)
        self.launches.append(
            Launched(function, tuple(seven[:3]), tuple(seven[3:6]), seven[6], stream, (attributes, number), held)
        )


def _text(out: int, text: bytes) -> None:
    kept = _texts.setdefault(text, ctypes.create_string_buffer(text))
    _P.from_address(out).value = ctypes.addressof(kept)


_texts: dict[bytes, Any] = {}
