"""A reader of safetensors, one file or a folder of shards, that trusts no header.

Layout of a file (the format's own description): the length of a JSON header as 8 little-endian bytes, the header (name
-> dtype, shape, begin and end of its bytes), the bytes. Opening checks that tensors fit their dtype, shape and place,
and that together they cover the bytes exactly; so no tensor reads another's bytes and none reads past the end.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from .errors import BadMagicError, MetadataError, TensorSetError, TruncatedFileError, UnknownTypeError
from .mapped import MappedFile
from .shards import find_weights, merge

if TYPE_CHECKING:
    from torch import Tensor

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
MAX_HEADER: Final = 100_000_000
"""Bytes of the longest header that the format allows."""

DTYPES: Final[Mapping[str, tuple[str, int]]] = MappingProxyType(
    {
        "BOOL": ("bool", 1),
        "U8": ("uint8", 1),
        "I8": ("int8", 1),
        "F8_E4M3": ("float8_e4m3fn", 1),
        "F8_E5M2": ("float8_e5m2", 1),
        "F8_E8M0": ("float8_e8m0fnu", 1),
        "U16": ("uint16", 2),
        "I16": ("int16", 2),
        "F16": ("float16", 2),
        "BF16": ("bfloat16", 2),
        "U32": ("uint32", 4),
        "I32": ("int32", 4),
        "F32": ("float32", 4),
        "U64": ("uint64", 8),
        "I64": ("int64", 8),
        "F64": ("float64", 8),
    }
)
"""The format's dtypes -> torch's name, bytes each."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file. dtype: torch's name. `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open file: `tensors` maps name to `Entry`, `metadata` holds the header's own texts.

    Raises `TruncatedFileError`, `BadMagicError`, `MetadataError`, `UnknownTypeError` or `TensorSetError`, each with the
    file and the tensor, and `OSError` where the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        start, header = self._header()
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise MetadataError(f"{path}: __metadata__ is {metadata!r:.60}, not an object")
        self.metadata: Mapping[str, object] = MappingProxyType(metadata)
        self.tensors: Mapping[str, Entry] = MappingProxyType(
            {name: self._entry(name, entry, start) for name, entry in header.items()}
        )
        self._check_cover(start)

    def data(self, name: str) -> Tensor:
        """The tensor `name`, a view; see `TensorSource.data`."""
        entry = self.tensors[name]
        return self._file.view(entry.offset, entry.nbytes, entry.dtype, entry.shape)

    def _header(self) -> tuple[int, dict[str, object]]:
        size = self._file.size
        if size < 8:
            raise TruncatedFileError(f"{self.path}: {size} bytes are no safetensors file; it is incomplete")
        length = int.from_bytes(self._file.bytes[:8], "little")
        if length > MAX_HEADER:
            raise BadMagicError(
                f"{self.path}: starts with {bytes(self._file.bytes[:8])!r}, which is no safetensors header's length"
            )
        if 8 + length > size:
            raise TruncatedFileError(
                f"{self.path}: the file has {size} bytes and its header alone {8 + length}; fetch it again"
            )
        try:
            header = json.loads(self._file.bytes[8 : 8 + length], object_pairs_hook=self._once)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadMagicError(f"{self.path}: the safetensors header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise MetadataError(f"{self.path}: the safetensors header is a JSON {type(header).__name__}, not an object")
        return 8 + length, header

    def _once(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise TensorSetError(f"{self.path}: '{twice}' appears twice in the header; only one can be meant")
        return made

    def _entry(self, name: str, entry: object, start: int) -> Entry:
        where = f"{self.path}: tensor '{name}'"
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise MetadataError(f"{where} is described by {entry!r:.80}, not by dtype, shape and data_offsets")
        label, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(label, str) or label not in DTYPES:
            raise UnknownTypeError(f"{where} has the unknown dtype {label!r}; known: {', '.join(DTYPES)}")
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
            raise MetadataError(f"{where} has shape {shape!r:.60} and data_offsets {offsets!r:.60}")
        dtype, width = DTYPES[label]
        begin, end = offsets
        if end - begin != prod(shape) * width:
            raise TensorSetError(
                f"{where}: bytes {begin} to {end} are {end - begin}, not the {prod(shape) * width} of {label} {shape}"
            )
        if start + end > self._file.size:
            raise TruncatedFileError(
                f"{where} ends at byte {start + end} of a file of {self._file.size}; it is incomplete, fetch it again"
            )
        return Entry(dtype, tuple(shape), start + begin, end - begin)

    def _check_cover(self, start: int) -> None:
        at, last = start, "the header"
        for name, entry in sorted(self.tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if entry.offset != at:
                relation = "overlaps" if entry.offset < at else f"leaves {entry.offset - at} unexplained bytes after"
                raise TensorSetError(f"{self.path}: tensor '{name}' {relation} {last}; the file is damaged")
            at, last = entry.offset + entry.nbytes, f"tensor '{name}'"
        if at != self._file.size:
            raise TensorSetError(f"{self.path}: {self._file.size - at} unexplained bytes follow {last}; it is damaged")


class SafetensorsFolder:
    """A `TensorSource`: the weights of a folder, in one file or several; `files` says which.

    Raises the errors of `SafetensorsFile`, and `TensorSetError` for a set that is incomplete, ambiguous, not as its
    index says, or that holds a tensor twice.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        there = sorted(folder.glob("*.safetensors"))
        if not there:
            raise TensorSetError(f"{folder} holds no .safetensors file")
        found = find_weights(folder, there, SINGLE, INDEX)
        opened = {path: SafetensorsFile(path) for path in (*found.files, *found.strays)}
        owner = merge(folder, found, lambda path: opened[path].tensors)
        self.files = found.files
        self._files = {name: opened[path] for name, path in owner.items()}

    def names(self) -> Collection[str]:
        """Every tensor."""
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """torch's name of the dtype."""
        return self._entry(name).dtype

    def nbytes(self, name: str) -> int:
        """Bytes in the file."""
        return self._entry(name).nbytes

    def data(self, name: str) -> Tensor:
        """See `TensorSource.data`."""
        self._entry(name)
        return self._files[name].data(name)

    def _entry(self, name: str) -> Entry:
        if name not in self._files:
            raise TensorSetError(f"{self.path}: tensor '{name}' is missing")
        return self._files[name].tensors[name]


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
