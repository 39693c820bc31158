"""A file mapped into memory, read with bounded residency.

Pages that were read stay counted as this process's memory until they are given back. They are, whenever more than
`WINDOW` bytes have been handed out since the last time: the page cache keeps them, so reading them again costs a fault.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

WINDOW: Final = 16 << 20


class MappedFile:
    """The bytes of a file. The mapping is private and lives as long as this object or any view of it; nobody writes."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else b""
        self._handed_out = 0

    def raw(self, offset: int, nbytes: int) -> np.ndarray:
        """(nbytes,) uint8, a view; earlier ones stay valid."""
        import numpy as np

        self._handed_out += nbytes
        if self._handed_out > WINDOW and isinstance(self.bytes, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self.bytes.madvise(mmap.MADV_DONTNEED)
            self._handed_out = nbytes
        return np.frombuffer(self.bytes, np.uint8, nbytes, offset)

    def view(self, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """The same as a tensor of torch's `dtype`; a copy where the place isn't a multiple of the element's size."""
        import torch

        kind: torch.dtype = getattr(torch, dtype)
        if nbytes == 0:
            return torch.empty(shape, dtype=kind)
        raw = torch.from_numpy(self.raw(offset, nbytes))
        return (raw.clone() if offset % kind.itemsize else raw).view(kind).view(shape)
