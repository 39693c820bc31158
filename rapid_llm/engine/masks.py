"""Which tokens a structure allows, as a change of logits.

Invariant: -inf is added to what is forbidden and nothing to the rest, so that NaN and +inf, which mean a broken model,
are still there for the sampler to find.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .grammar import Constraint

_BITS = 32


def _changes(device: torch.device) -> Tensor:
    """For each byte of a mask what is added to the logits of its eight tokens, of which the lowest bit is the first."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return torch.zeros(256, 8).masked_fill(bits == 0, -torch.inf).to(device)


class TokenMasks:
    """Applies constraints to logits on a device. Its buffer may be filled again once the device is done with a step.

    max_rows: of one call.
    """

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self._device = device
        self._max_rows = max_rows
        self._words: Tensor | None = None
        self._changes = _changes(device)

    def __call__(self, logits: Tensor, constrained: Sequence[tuple[int, Constraint]]) -> None:
        """Add -inf in place to what each (row, constraint) forbids of logits (rows, vocab) fp32.

        Each row's mask is computed on the host, without a look at the logits.
        """
        count, words = len(constrained), constrained[0][1].words
        if self._words is None:
            pin = self._device.type != "cpu"
            self._words = torch.zeros(self._max_rows, words, dtype=torch.int32, pin_memory=pin)
        host = self._words[:count]
        for row, (_, constraint) in zip(host.numpy(), constrained, strict=True):
            constraint.fill(row)
        masks = host.to(self._device, non_blocking=True).view(torch.uint8).flatten().int()
        change = self._changes.index_select(0, masks).view(count, words * _BITS)[:, : logits.shape[1]]
        if count == len(logits):
            logits += change
        else:
            rows = torch.tensor([row for row, _ in constrained])
            logits.index_add_(0, rows.to(self._device, non_blocking=True), change)
