"""A memory-mapped reader of GGUF, the single-file model format of llama.cpp (versions 2 and 3, little-endian).

Layout: magic, version, counts; key/value metadata; tensor infos; then, aligned, the tensors' bytes. Opening a file
walks the header once and checks every length against the file's size, so nothing is read past its end and no count in
a hostile header allocates memory. Arrays (a vocabulary of 49k strings) are decoded when first asked for.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np

from .errors import (
    BadMagicError,
    MetadataError,
    ModelError,
    TensorSetError,
    TruncatedFileError,
    UnknownTypeError,
)
from .mapped import MappedFile

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAX_DIMS: Final = 4

TENSOR_TYPES: Final = MappingProxyType(
    {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        9: ("Q8_1", 32, 40),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1),
        25: ("I16", 1, 2),
        26: ("I32", 1, 4),
        27: ("I64", 1, 8),
        28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
    }
)
"""ggml type id -> (name, weights a block, bytes a block). Known here means readable, not that ops compute with it."""

_SCALARS: Final = MappingProxyType(
    {
        0: ("u8", "<B", "u1"),
        1: ("i8", "<b", "i1"),
        2: ("u16", "<H", "<u2"),
        3: ("i16", "<h", "<i2"),
        4: ("u32", "<I", "<u4"),
        5: ("i32", "<i", "<i4"),
        6: ("f32", "<f", "<f4"),
        7: ("bool", "<?", "?"),
        10: ("u64", "<Q", "<u8"),
        11: ("i64", "<q", "<i8"),
        12: ("f64", "<d", "<f8"),
    }
)
_STRING: Final = 8
_ARRAY: Final = 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor's place in the file. `shape` is in row-major order (GGUF stores the fastest axis first): a linear
    weight is (out_features, in_features). `offset` counts from the start of the file; `nbytes` is the size there."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along the last axis."""
        return self.nbytes // prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class _Array:
    """An array of metadata that is still in the file: element type, count, position of the first element."""

    type: int
    count: int
    position: int


class GGUFFile(Mapping[str, object]):
    """An open GGUF file: a mapping of its metadata, and `tensors`, a mapping of name to `TensorInfo`.

    Values are int, float, bool, str, or a tuple of these. The mapping of the file is private (copy-on-write) and lives
    as long as this object or any array from `data`.

    Raises `BadMagicError`, `TruncatedFileError`, `MetadataError`, `UnknownTypeError` or `TensorSetError`, all of them
    `ModelError`; and `OSError` where the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        mapped = MappedFile(self.path)
        self.size = mapped.size
        if mapped.bytes[:4] != MAGIC:
            raise self._not_gguf(mapped.bytes[:4])
        self._mapped, self._map = mapped, mapped.bytes
        self._position = 4
        self._entries: dict[str, object] = {}
        self.version, tensor_count, kv_count = self._read_head()
        for _ in range(kv_count):
            self._read_entry()
        self.alignment = self._read_alignment()
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._read_tensors(tensor_count))

    def __getitem__(self, key: str) -> object:
        value = self._entries[key]
        if isinstance(value, _Array):
            value = self._entries[key] = self._decode(key, value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}: {len(self)} entries, {len(self.tensors)} tensors)"

    def require(self, key: str, kind: type[T]) -> T:
        """The entry `key`, which must be a `kind`; raises `MetadataError` where it is absent or something else."""
        if key not in self._entries:
            raise MetadataError(f"{self.path}: metadata key '{key}' is missing; convert the model again")
        return self._typed(key, kind)

    def optional(self, key: str, kind: type[T], default: T) -> T:
        """The entry `key`, which must be a `kind`, or `default` where it is absent."""
        return self._typed(key, kind) if key in self._entries else default

    def _typed(self, key: str, kind: type[T]) -> T:
        value = self[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:80]}…"
            raise MetadataError(f"{self.path}: metadata key '{key}' is {shown}, not a {kind.__name__}")
        return value

    def data(self, name: str) -> np.ndarray:
        """The raw bytes of a tensor: (rows, bytes a row) uint8, a view of the mapping (no copy)."""
        if name not in self.tensors:
            raise TensorSetError(f"{self.path}: no tensor '{name}'")
        info = self.tensors[name]
        return self._mapped.raw(info.offset, info.nbytes).reshape(-1, info.row_bytes)

    # The walk over the header ---------------------------------------------------------------------------------------

    def _read_head(self) -> tuple[int, int, int]:
        version = self._u32("the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = (
                "it is big-endian; convert it with gguf-convert-endian" if swapped in VERSIONS else "convert it again"
            )
            raise BadMagicError(f"{self.path}: GGUF version {version} is not read (2 and 3 are): {hint}")
        return version, self._u64("the tensor count"), self._u64("the metadata count")

    def _read_entry(self) -> None:
        key = self._string("a metadata key")
        if key in self._entries:
            raise MetadataError(f"{self.path}: metadata key '{key}' appears twice; convert the model again")
        kind = self._u32(f"the type of '{key}'")
        if kind == _STRING:
            self._entries[key] = self._string(f"'{key}'")
        elif kind == _ARRAY:
            self._entries[key] = self._skip_array(key)
        else:
            _, code, _ = self._scalar(kind, key)
            self._need(struct.calcsize(code), f"'{key}'")
            self._entries[key] = struct.unpack_from(code, self._map, self._position)[0]
            self._position += struct.calcsize(code)

    def _skip_array(self, key: str) -> _Array:
        kind = self._u32(f"the element type of '{key}'")
        count = self._u64(f"the length of '{key}'")
        if kind == _ARRAY:
            raise UnknownTypeError(f"{self.path}: metadata key '{key}' is an array of arrays, which is not read")
        start = self._position
        if kind != _STRING:
            width = np.dtype(self._scalar(kind, key)[2]).itemsize
            self._need(count * width, f"'{key}'")
            self._position += count * width
            return _Array(kind, count, start)
        self._need(count * _U64.size, f"'{key}'")
        position, unpack, data = start, _U64.unpack_from, self._map
        try:
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
        except (struct.error, OverflowError):
            raise self._truncated(f"'{key}'") from None
        if position > self.size:
            raise self._truncated(f"'{key}'")
        self._position = position
        return _Array(kind, count, start)

    def _read_alignment(self) -> int:
        alignment = self.optional("general.alignment", int, DEFAULT_ALIGNMENT)
        if alignment < 8 or alignment & (alignment - 1):
            raise MetadataError(f"{self.path}: general.alignment is {alignment}, not a power of two of at least 8")
        return alignment

    def _read_tensors(self, count: int) -> dict[str, TensorInfo]:
        raw: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self._string("a tensor's name")
            if name in raw:
                raise TensorSetError(f"{self.path}: tensor '{name}' appears twice; convert the model again")
            raw[name] = self._read_tensor(name)
        start = -(-self._position // self.alignment) * self.alignment
        infos = {n: TensorInfo(n, kind, shape, start + offset, size) for n, (kind, shape, offset, size) in raw.items()}
        for info in infos.values():
            if info.offset + info.nbytes > self.size:
                raise self._truncated(f"tensor '{info.name}', which ends at byte {info.offset + info.nbytes}")
        return infos

    def _read_tensor(self, name: str) -> tuple[str, tuple[int, ...], int, int]:
        rank = self._u32(f"the rank of '{name}'")
        if not 1 <= rank <= MAX_DIMS:
            raise TensorSetError(f"{self.path}: tensor '{name}' has {rank} dimensions; GGUF has 1 to {MAX_DIMS}")
        shape = tuple(self._u64(f"the shape of '{name}'") for _ in range(rank))[::-1]
        kind = self._u32(f"the type of '{name}'")
        offset = self._u64(f"the offset of '{name}'")
        if kind not in TENSOR_TYPES:
            raise UnknownTypeError(
                f"{self.path}: tensor '{name}' has the unknown ggml type {kind}; convert the model to Q4_0, Q4_1, "
                "Q8_0, F16, BF16 or F32"
            )
        label, block, width = TENSOR_TYPES[kind]
        if 0 in shape or shape[-1] % block:
            raise TensorSetError(
                f"{self.path}: tensor '{name}' has shape {shape}; rows of {label} are blocks of {block}"
            )
        if offset % self.alignment:
            raise TensorSetError(f"{self.path}: tensor '{name}' is at {offset}, not a multiple of {self.alignment}")
        return label, shape, offset, prod(shape) // block * width

    # Primitives ------------------------------------------------------------------------------------------------------

    def _decode(self, key: str, array: _Array) -> tuple[object, ...]:
        if array.type != _STRING:
            dtype = _SCALARS[array.type][2]
            return tuple(np.frombuffer(self._map, dtype, array.count, array.position).tolist())
        position, unpack, data = array.position, _U64.unpack_from, self._map
        texts: list[str] = []
        try:
            for _ in range(array.count):
                end = position + 8 + unpack(data, position)[0]
                texts.append(str(data[position + 8 : end], "utf-8"))
                position = end
        except UnicodeDecodeError as error:
            raise MetadataError(
                f"{self.path}: metadata key '{key}'[{len(texts)}] is not UTF-8: {error.object!r}"
            ) from None
        return tuple(texts)

    def _scalar(self, kind: int, key: str) -> tuple[str, str, str]:
        if kind not in _SCALARS:
            raise UnknownTypeError(f"{self.path}: metadata key '{key}' has the unknown value type {kind}")
        return _SCALARS[kind]

    def _u32(self, what: str) -> int:
        self._need(4, what)
        self._position += 4
        return int(_U32.unpack_from(self._map, self._position - 4)[0])

    def _u64(self, what: str) -> int:
        self._need(8, what)
        self._position += 8
        return int(_U64.unpack_from(self._map, self._position - 8)[0])

    def _string(self, what: str) -> str:
        length = self._u64(what)
        self._need(length, what)
        start, self._position = self._position, self._position + length
        try:
            return str(self._map[start : self._position], "utf-8")
        except UnicodeDecodeError as error:
            raise MetadataError(f"{self.path}: {what} at byte {start} is not UTF-8: {error.object[:40]!r}") from None

    def _need(self, nbytes: int, what: str) -> None:
        if self._position + nbytes > self.size:
            raise self._truncated(what)

    def _truncated(self, what: str) -> TruncatedFileError:
        return TruncatedFileError(
            f"{self.path}: the file has {self.size} bytes and ends inside {what}; it is incomplete, fetch it again"
        )

    def _not_gguf(self, head: bytes) -> ModelError:
        if len(head) < len(MAGIC) and MAGIC.startswith(head):
            return self._truncated("the magic number")
        return BadMagicError(
            f"{self.path}: starts with {head!r}, not {MAGIC!r}: not a GGUF file; give a path to a .gguf"
        )
