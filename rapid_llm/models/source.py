"""`TensorSource`: where weights come from, whatever the format. Loading asks nothing else of a file or folder.

Tensors are views of mapped memory: opening a source reads headers, and a tensor's bytes are read when it is copied
from.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from torch import Tensor

LOAD_FORMATS: Final = ("auto", "pt")
"""auto: safetensors or GGUF. pt: torch's pickled files too, where a folder has nothing else."""


class TensorSource(Protocol):
    """Named tensors of one model.

    Every method that takes a name raises `TensorSetError` where the source has no such tensor.
    """

    @property
    def path(self) -> Path:
        """The file or folder, for messages."""

    def names(self) -> Collection[str]:
        """The name of every tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """In weights, row-major: a linear weight is (out_features, in_features), quantised or not."""

    def dtype(self, name: str) -> str:
        """torch's name for plain numbers (`float32`, `bfloat16`, `int32`), ggml's for blocks (`Q4_1`)."""

    def data(self, name: str) -> Tensor:
        """The tensor, a view on the CPU that must not be written to and is to be copied before the next is asked for.

        Plain numbers have `shape` and `dtype`; blocks are uint8, `shape` but for the last axis, which is bytes a row.
        """
