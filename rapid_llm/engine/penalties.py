"""Penalties, biases and early stops: the changes of a request's logits that concern a few tokens of the vocabulary.

All of them are one list of edits per request, each edit one token's: `logit > 0 ? logit / divisor : logit * divisor`,
then `+ addend`. The list is kept up to date token by token on the host; a step uploads the lists of the requests that
have one and applies them in a handful of vector operations, whose cost grows with the edits and not with the
vocabulary. A request without penalties has no list and costs nothing.

Invariants: an edit depends on its own request alone. What is forbidden has -inf added to it, never written over it,
so that NaN and +inf, which mean a broken model, are still there for the sampler to find.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .params import SamplingParams

_SPARE = 64


class LogitEdits:
    """The edits of one sequence.

    repetition_penalty counts the prompt and the output, presence_penalty and frequency_penalty the output alone:
    divisor = repetition_penalty of each token in either; addend = logit_bias - presence_penalty (once in the output)
    - frequency_penalty * occurrences in the output. The ids that end the sequence come first, and have -inf for an
    addend until `min_tokens` are there.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], stop_ids: Iterable[int], vocab_size: int
    ) -> None:
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._counts_output = (self._repetition, self._presence, self._frequency) != (1.0, 0.0, 0.0)
        self._min_tokens = params.min_tokens
        biases = dict(params.biases)
        stops = [token for token in stop_ids if token < vocab_size] if params.min_tokens else []
        prompt = {token for token in prompt_ids if token < vocab_size} if self._repetition != 1.0 else set()
        tokens = list(dict.fromkeys([*stops, *biases, *sorted(prompt)]))
        self._stops = len(stops)
        self._slot = {token: slot for slot, token in enumerate(tokens)}
        self._prompt_len = len(prompt_ids)
        self._counted = 0
        size = len(tokens) + _SPARE
        self._tokens = np.zeros(size, dtype=np.int64)
        self._tokens[: len(tokens)] = tokens
        self._divisor = np.ones(size, dtype=np.float32)
        self._divisor[[self._slot[token] for token in prompt]] = self._repetition
        self._count = np.zeros(size, dtype=np.int64)
        self._bias = np.zeros(size, dtype=np.float64)
        self._bias[[self._slot[token] for token in biases]] = list(biases.values())
        self._addend = self._bias.astype(np.float32)

    @classmethod
    def of(
        cls, params: SamplingParams, prompt_ids: Sequence[int], stop_ids: Iterable[int], vocab_size: int
    ) -> LogitEdits | None:
        """The edits that `params` ask for, None where they ask for none."""
        neutral = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
        if neutral and not params.biases and not params.min_tokens:
            return None
        return cls(params, prompt_ids, stop_ids, vocab_size)

    def __len__(self) -> int:
        return len(self._slot)

    def count(self, ids: Sequence[int]) -> None:
        """Take in what came since the last call; ids: the prompt, then all output so far."""
        output = len(ids) - self._prompt_len
        if self._counts_output:
            for token in ids[self._prompt_len + self._counted :]:
                self._count_one(token)
        self._counted = output

    def fill(self, tokens: npt.NDArray[Any], divisors: npt.NDArray[Any], addends: npt.NDArray[Any]) -> None:
        """Write the edits of the next token into arrays of `len(self)`."""
        size = len(self._slot)
        tokens[:] = self._tokens[:size]
        divisors[:] = self._divisor[:size]
        addends[:] = self._addend[:size]
        if self._counted < self._min_tokens:
            addends[: self._stops] = -np.inf

    def _count_one(self, token: int) -> None:
        slot = self._slot.get(token)
        if slot is None:
            slot = self._slot[token] = len(self._slot)
            if slot == len(self._tokens):
                self._grow()
            self._tokens[slot] = token
        self._divisor[slot] = self._repetition
        self._count[slot] += 1
        self._addend[slot] = self._bias[slot] - self._presence - self._frequency * self._count[slot]

    def _grow(self) -> None:
        size = 2 * len(self._tokens)
        for name, rest in (("_tokens", 0), ("_divisor", 1), ("_count", 0), ("_bias", 0), ("_addend", 0)):
            old = getattr(self, name)
            new = np.full(size, rest, dtype=old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)


class LogitEditor:
    """Applies edits to logits on a device. Its buffers may be filled again once the device is done with a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._capacity = 0

    def __call__(self, logits: Tensor, edited: Sequence[tuple[int, LogitEdits]]) -> None:
        """Change `logits` (rows, vocab) fp32 in place by the edits of (row, edits). Does not wait for the device."""
        total = sum(len(edits) for _, edits in edited)
        if not total:
            return
        if total > self._capacity:
            self._allocate(max(total, 2 * self._capacity, 1024))
        index, real = self._index_np[: 2 * total].reshape(2, total), self._real_np[: 2 * total].reshape(2, total)
        begin = 0
        for row, edits in edited:
            end = begin + len(edits)
            index[0, begin:end] = row
            edits.fill(index[1, begin:end], real[0, begin:end], real[1, begin:end])
            begin = end
        rows, tokens = self._upload(self._index, total)
        divisors, addends = self._upload(self._real, total)
        values = logits[rows, tokens]
        logits[rows, tokens] = torch.where(values > 0, values / divisors, values * divisors) + addends

    def _allocate(self, capacity: int) -> None:
        pin = not self._on_cpu
        self._capacity = capacity
        self._index = torch.zeros(2 * capacity, dtype=torch.int64, pin_memory=pin)
        self._real = torch.zeros(2 * capacity, dtype=torch.float32, pin_memory=pin)
        self._index_np, self._real_np = self._index.numpy(), self._real.numpy()

    def _upload(self, buffer: Tensor, total: int) -> Tensor:
        view = buffer[: 2 * total].view(2, total)
        return view if self._on_cpu else view.to(self._device, non_blocking=True)
