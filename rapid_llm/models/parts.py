"""What of a checkpoint goes into one matrix: the parts that are fused, and what was found of each."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .parallel import Cut


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a fused matrix. at: the tensor's name without `.weight`. cut: what of it is kept. heads > 0 undoes the
    interleaving."""

    at: str
    rows: int
    cut: Cut
    heads: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """A part's rows before they are copied. kind: of the tensor, for messages. data: rows that had to be read already;
    quantised: the tensor is dense, and is to become `scheme`."""

    name: str
    kind: str
    scheme: str
    data: Tensor | None = None
    quantised: bool = False
