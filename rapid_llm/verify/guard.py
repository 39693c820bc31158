"""Private, poisoned memory for one tensor argument, so that a row cannot touch anything else unseen.

A guarded tensor is a copy with the original's sizes, strides and alignment, inside a storage of its own with margins
on both sides. Margins and the gaps between strided elements hold poison (NaN for floats), which must survive every
call.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rapid_llm.verify.cases.build import parted, parted_shape

MARGIN: Final = 64
"""Elements of poison on either side."""

LIMIT: Final = 1 << 24
"""Tensors that span more elements stay in their own storage: only their elements are watched, not the gaps."""

FINITE: Final = 240.0
"""The poison that is a number; every format holds it."""

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def span(tensor: Tensor) -> int:
    """Elements from the first to the last that `tensor` reaches, gaps included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum(int((n - 1) * s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, for comparisons in which NaN equals itself."""
    return tensor.view(_BITS[tensor.element_size()]) if tensor.element_size() in _BITS else tensor


def unique_view(tensor: Tensor) -> Tensor:
    """`tensor` with every expanded (stride 0) dimension cut to one, so that it can be written."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _poison(values: Tensor) -> float | int:
    if values.dtype.is_floating_point:
        return float("nan")
    # Integers are often ids, slots or pages: poison that is a legal index cannot crash a GPU, yet gives a wrong answer.
    return int(values.max()) if values.numel() else 0


class Guarded:
    """A tensor in poisoned memory. `tensor` goes to the row; `stray()` and `changed()` tell what the row did to it."""

    def __init__(self, values: Tensor) -> None:
        self._large = span(values) > LIMIT
        if self._large:
            self.tensor = values
            self._original = unique_view(values).clone()
        else:
            self._house(values)
        self.watch()

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        layout: str = "contiguous",
        finite: bool = False,
    ) -> Guarded:
        """An output filled with NaN, a `finite` number or a recognisable integer. layout: `contiguous`, `strided` (a
        gap after every element) or `parted` (see `cases.build.lay`)."""
        wide = shape
        if shape and layout == "strided":
            wide = (*shape[:-1], 2 * shape[-1])
        elif shape and layout == "parted":
            wide = parted_shape(shape)
        elif layout not in ("contiguous", "strided", "parted"):
            raise ValueError(f"unknown layout {layout!r} of an output; known: contiguous, strided, parted")
        fill = (FINITE if finite else float("nan")) if dtype.is_floating_point else -(2**31) + 7
        whole = torch.full(wide, fill, dtype=dtype, device=device)
        if wide == shape:
            return cls(whole)
        return cls(whole[..., ::2] if layout == "strided" else parted(whole, shape))

    def _house(self, values: Tensor) -> None:
        size = values.element_size()
        lead = MARGIN + (values.data_ptr() % 64) // size
        whole = (lead + span(values) + MARGIN,)
        self._storage = torch.full(whole, _poison(values), dtype=values.dtype, device=values.device)
        self.tensor = self._storage.as_strided(values.shape, values.stride(), lead)
        unique_view(self.tensor).copy_(unique_view(values))
        inside = torch.zeros(self._storage.shape, dtype=torch.bool, device=values.device)
        if values.numel():
            unique_view(inside.as_strided(values.shape, values.stride(), lead)).fill_(True)
        self._outside = ~inside

    def fits(self, values: Tensor) -> bool:
        """Whether `values` could be put into the very same memory."""
        mine = self.tensor
        return values is mine or (
            not self._large
            and mine.dtype == values.dtype
            and mine.shape == values.shape
            and mine.stride() == values.stride()
            and mine.data_ptr() % 64 == values.data_ptr() % 64
        )

    def refill(self, values: Tensor) -> None:
        """Put values into the same memory, poison included; into a large tensor, those that it had at first."""
        if self._large:
            unique_view(self.tensor).copy_(self._original)
        else:
            self._storage.fill_(_poison(values))
            unique_view(self.tensor).copy_(unique_view(values))
        self.watch()

    def watch(self) -> None:
        """Remember the memory as it is now."""
        watched = unique_view(self.tensor) if self._large else self._storage
        self._before = bits(watched.clone())

    def stray(self) -> int:
        """Elements outside of the tensor that changed: margins and gaps."""
        if self._large:
            return 0
        return int(torch.count_nonzero((bits(self._storage) != self._before) & self._outside))

    def changed(self) -> int:
        """Elements that changed, the tensor's own included."""
        watched = unique_view(self.tensor) if self._large else self._storage
        now = bits(watched)
        return 0 if torch.equal(now, self._before) else int(torch.count_nonzero(now != self._before))
