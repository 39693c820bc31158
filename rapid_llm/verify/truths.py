"""Truths that are kept from one run to the next: several rows, and all wrong rows, meet the same calls.

A truth is found again by the numbers of the call, not by the name of the case that made them, so that it cannot be
that of another call; what a row writes into its arguments never reaches it, for a row gets copies.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels.registry import OpSpec
from rapid_llm.verify.truth import Truth, truth_of

_MOST: Final = 1 << 24
"""Bytes of a call's arguments above which reading them takes too long, or they span address space."""


class Truths:
    """Keeps what `truth_of` answered, as long as the answers have at most `limit` bytes; the oldest go first.

    Not for several threads.
    """

    def __init__(self, limit: int = 1 << 28) -> None:
        self.limit = limit
        self.held = 0
        self._kept: OrderedDict[bytes, tuple[Truth, int]] = OrderedDict()

    def of(self, op: OpSpec, values: dict[str, Any], roundings: tuple[str, ...]) -> Truth:
        """As `truth_of`; the tensors of the answer are shared by all who ask for it."""
        key = _key(op, values, roundings)
        if key is None:
            return truth_of(op, values, roundings)
        if key in self._kept:
            self._kept.move_to_end(key)
            return replace(self._kept[key][0], values=values)
        truth = truth_of(op, values, roundings)
        size = sum(t.nbytes for answer in (truth.expected, truth.bounds) for t in _tensors(answer))
        self._kept[key] = replace(truth, values={}), size
        self.held += size
        while self.held > self.limit:
            self.held -= self._kept.popitem(last=False)[1][1]
        return truth


def _tensors(answer: Any) -> Iterable[Tensor]:
    return (answer,) if isinstance(answer, Tensor) else answer


def _key(op: OpSpec, values: dict[str, Any], roundings: tuple[str, ...]) -> bytes | None:
    """A digest of all that decides on a truth; None for arguments that are too large to be read each time."""
    tensors = {name: v for name, v in values.items() if isinstance(v, Tensor)}
    if sum(v.nbytes for v in tensors.values()) > _MOST:
        return None
    plain = {name: v for name, v in sorted(values.items()) if name not in tensors}
    digest = hashlib.blake2b(repr((op.id, op.oracle, op.bound, roundings, plain)).encode(), digest_size=20)
    for name, value in sorted(tensors.items()):
        digest.update(repr((name, value.dtype, tuple(value.shape))).encode())
        dense = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        digest.update(dense.view(-1).view(torch.uint8).numpy())
    return digest.digest()
