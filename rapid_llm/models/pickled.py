"""Weights in torch's own files (`.bin`, `.pt`, `.pth`), which are pickles: read only when asked for.

A pickle is a program. torch's `weights_only` unpickler runs none of it beyond what tensors need, and refuses the rest;
it is the only one used here. Files of the zip format are mapped, older ones are read into memory whole.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .errors import TensorSetError, UnsafeWeightsError
from .shards import find_weights, merge

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES: Final = (".bin", ".pt", ".pth")
SINGLE: Final = "pytorch_model.bin"
INDEX: Final = "pytorch_model.bin.index.json"
_STEMS: Final = ("pytorch_model", "model", "consolidated")
"""How names of weights begin; a trainer leaves other pickles (`optimizer.pt`) beside them."""


def pickled_files(folder: Path) -> list[Path]:
    """The files of `folder` that are weights by their names."""
    return sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES and p.stem.startswith(_STEMS))


class PickledFolder:
    """A `TensorSource` over the pickled weights of a folder.

    Raises `UnsafeWeightsError` for a file that the `weights_only` unpickler refuses, `TensorSetError` for one that
    holds anything but named tensors and for the faults of `find_weights` and `merge`.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        there = pickled_files(folder)
        if not there:
            raise TensorSetError(f"{folder} holds no weights named like {SINGLE}")
        found = find_weights(folder, there, SINGLE, INDEX)
        opened = {path: _read(path) for path in (*found.files, *found.strays)}
        owner = merge(folder, found, lambda path: opened[path])
        self.files = found.files
        self._tensors = {name: opened[path][name] for name, path in owner.items()}

    def names(self) -> Collection[str]:
        """Every tensor."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        return tuple(self.data(name).shape)

    def dtype(self, name: str) -> str:
        """torch's name of the dtype."""
        return str(self.data(name).dtype).removeprefix("torch.")

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor."""
        return int(self.data(name).nbytes)

    def data(self, name: str) -> Tensor:
        """See `TensorSource.data`."""
        if name not in self._tensors:
            raise TensorSetError(f"{self.path}: tensor '{name}' is missing")
        return self._tensors[name]


def _read(path: Path) -> dict[str, Tensor]:
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsafeWeightsError(
            f"{path}: torch's weights_only unpickler refuses it ({first}); convert the model to "
            "safetensors, on a machine that may run what the file holds"
        ) from error
    if not isinstance(found, dict) or not all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in found.items()
    ):
        raise TensorSetError(f"{path} holds a {type(found).__name__}, not a table of named tensors")
    return {name: tensor.detach().contiguous() for name, tensor in found.items()}


def _is_zip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"
