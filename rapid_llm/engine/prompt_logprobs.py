"""Log-probabilities of a prompt's own tokens. Invariant: the logits of only a few rows exist at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from .sampler import RawLogprob

MAX_LOGITS: Final = 1 << 22
"""Logits that exist at a time, in fp32, whatever the length of the prompt; one row if a row is longer."""


def rows_at_a_time(vocab_size: int) -> int:
    """Rows whose logits exist at a time."""
    return max(1, MAX_LOGITS // vocab_size)


def score(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, targets: Sequence[int], *, top: int, vocab_size: int
) -> list[list[RawLogprob]]:
    """For each row of `hidden` (rows, hidden size), the token it should predict, then the `top` most probable others.

    logits_of: (rows, at least vocab_size) logits of hidden states. targets: a token per row. Natural logs of the
    model's own distribution over the first `vocab_size` ids, in fp32; ranks from 1, tokens of equal probability sharing
    the better one in the target's entry.
    """
    rows = rows_at_a_time(vocab_size)
    found: list[list[RawLogprob]] = []
    for start in range(0, len(targets), rows):
        part = targets[start : start + rows]
        logits = logits_of(hidden[start : start + len(part)])[:, :vocab_size].float()
        found += _report(torch.log_softmax(logits, dim=-1), part, min(top, vocab_size))
    return found


def _report(logprobs: Tensor, targets: Sequence[int], top: int) -> list[list[RawLogprob]]:
    own = logprobs.gather(1, torch.tensor(targets, device=logprobs.device).unsqueeze(1))
    ranks = ((logprobs > own).sum(1) + 1).tolist()
    best = logprobs.topk(top, dim=1)
    lines = zip(targets, own[:, 0].tolist(), ranks, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        [
            RawLogprob(target, logprob, rank),
            *(
                RawLogprob(token, value, place)
                for place, (token, value) in enumerate(zip(ids, values, strict=True), start=1)
                if token != target
            ),
        ]
        for target, logprob, rank, ids, values in lines
    ]
