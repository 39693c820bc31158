"""A GGUF file as a `TensorSource`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from .errors import TensorSetError
from .gguf import GGUFFile, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

PLAIN: Final = MappingProxyType(
    {
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F64": "float64",
        "I8": "int8",
        "I16": "int16",
        "I32": "int32",
        "I64": "int64",
    }
)
"""ggml types that are plain numbers -> torch's name."""


class GGUFSource:
    """A `TensorSource` over an open GGUF file, which is `file`."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file

    @property
    def path(self) -> Path:
        """The file; the first part of a split one."""
        return self.file.path

    def names(self) -> Collection[str]:
        """Every tensor."""
        return self.file.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        return self._info(name).shape

    def dtype(self, name: str) -> str:
        """torch's name for plain numbers, ggml's for blocks."""
        kind = self._info(name).type
        return PLAIN.get(kind, kind)

    def nbytes(self, name: str) -> int:
        """Bytes in the file."""
        return self._info(name).nbytes

    def data(self, name: str) -> Tensor:
        """See `TensorSource.data`."""
        import torch

        info = self._info(name)
        raw = torch.from_numpy(self.file.data(name))
        if info.type in PLAIN:
            return raw.view(-1).view(getattr(torch, PLAIN[info.type])).view(info.shape)
        return raw.view(*info.shape[:-1], info.row_bytes)

    def _info(self, name: str) -> TensorInfo:
        if name not in self.file.tensors:
            raise TensorSetError(f"{self.path}: tensor '{name}' is missing; convert the model again")
        return self.file.tensors[name]
