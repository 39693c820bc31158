"""GGUF models in one file or in the parts that llama.cpp's splitter makes, behind the face of one file.

Every part states its number, how many there are, and how many tensors all hold together; the first has the metadata.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from .errors import MetadataError, TensorSetError
from .gguf import GGUFFile, TensorInfo
from .shards import numbered_set

_NUMBER: Final = "split.no"
_COUNT: Final = "split.count"
_TENSORS: Final = "split.tensors.count"


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """The model that `path`, a whole file or any part of a split one, belongs to.

    Raises the errors of `GGUFFile` and of `GGUFSplit`.
    """
    file = GGUFFile(path)
    count = file.optional(_COUNT, int, 1)
    if count <= 1:
        return file
    parts = numbered_set(file.path)
    if len(parts) != count:
        raise TensorSetError(
            f"{file.path} is one of {count} parts of a model; name them as the splitter did, "
            f"name-00001-of-{count:05}.gguf and so on, or join them with 'llama-gguf-split --merge'"
        )
    return GGUFSplit(parts)


class GGUFSplit(GGUFFile):
    """All parts of a split model as one `GGUFFile`: the first part's metadata, every part's tensors.

    The `split.*` entries, which speak of one part, are left out. `size` counts the bytes of all parts, `parts` names
    them; a `TensorInfo`'s offset is that in its own part. Raises `TensorSetError` and `MetadataError` for parts that
    are mixed up or do not add up.
    """

    def __init__(self, parts: tuple[Path, ...]) -> None:
        super().__init__(parts[0])
        self.parts = parts
        self._owner: dict[str, GGUFFile] = {}
        total = self.require(_TENSORS, int)
        opened: list[GGUFFile] = [self, *map(GGUFFile, parts[1:])]
        merged: dict[str, TensorInfo] = {}
        for number, part in enumerate(opened):
            _check(part, {_NUMBER: number, _COUNT: len(parts), _TENSORS: total})
            for name, info in part.tensors.items():
                if name in merged:
                    other = self._owner.get(name, self).path.name
                    raise TensorSetError(f"{part.path}: tensor '{name}' is in {other} too; only one can be meant")
                merged[name] = info
                if part is not self:
                    self._owner[name] = part
        if len(merged) != total:
            raise TensorSetError(
                f"{self.path}: the {len(parts)} parts hold {len(merged)} tensors, and {_TENSORS} says {total}: "
                "they are not of one model; fetch them all again"
            )
        for key in (_NUMBER, _COUNT, _TENSORS):
            del self._entries[key]
        self.size = sum(part.size for part in opened)
        self.tensors = MappingProxyType(merged)

    def data(self, name: str) -> np.ndarray:
        """As `GGUFFile.data`, from the part that holds the tensor."""
        return self._owner[name].data(name) if name in self._owner else super().data(name)


def _check(part: GGUFFile, stated: Mapping[str, int]) -> None:
    for key, value in stated.items():
        found = part.require(key, int)
        if found != value:
            raise MetadataError(
                f"{part.path}: {key} is {found}, not {value} as its name and the first part say; fetch it again"
            )
