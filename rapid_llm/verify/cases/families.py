"""Kinds of numbers that activations take and that random normal ones never show, each by name.

A family is a function (generator, shape, dtype) -> values. `FAMILIES` are those that every op over floats takes;
`EXTREME` goes to the ends of the format, for ops whose arithmetic stays finite there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
from torch import Tensor

from rapid_llm.verify.cases.build import integers, normal
from rapid_llm.verify.ulp import e4m3_numbers, format_of

Family: TypeAlias = Callable[[torch.Generator, Sequence[int], torch.dtype], Tensor]


def tiny(g: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Around 1e-3."""
    return normal(g, shape, dtype, 1e-3)


def large(g: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Around 1e3."""
    return normal(g, shape, dtype, 1e3)


def one_channel(g: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """One channel is a hundred times the others, as in the residual stream of many models."""
    values = torch.randn(tuple(shape), generator=g)
    values[..., int(torch.randint(0, shape[-1], (), generator=g))] *= 100.0
    return values.to(dtype)


def shifted(g: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Of one sign, far from zero for their spread: variances by subtraction lose everything."""
    return (torch.randn(tuple(shape), generator=g) * 0.05 + 20.0).to(dtype)


def heavy(g: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Heavy tails: a few values are hundreds of times the median."""
    spread = torch.rand(tuple(shape), generator=g).clamp_min(1e-3)
    return (torch.randn(tuple(shape), generator=g) / spread).clamp(-3e4, 3e4).to(dtype)


def cancelling(g: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Neighbours that nearly cancel: sums are small beside their terms."""
    values = torch.randn(tuple(shape), generator=g) * 50.0
    half = shape[-1] // 2
    values[..., half : 2 * half] = -values[..., :half] * (
        1 + 2.0**-7 * torch.rand(values[..., :half].shape, generator=g)
    )
    return values.to(dtype)


def subnormal(g: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Subnormal numbers of the format, some normal ones among them."""
    fmt = format_of(dtype)
    step = 2.0 ** (fmt.emin - fmt.precision + 1)
    counts = integers(g, shape, -(2 ** (fmt.precision - 1)), 2 ** (fmt.precision - 1), torch.float64)
    values = counts * step
    values[torch.rand(tuple(shape), generator=g) < 0.1] = 1.0
    return values.to(dtype)


def signed_zero(g: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of both signs, and now and then a number."""
    values = torch.where(torch.rand(tuple(shape), generator=g) < 0.5, 0.0, -0.0)
    few = torch.rand(tuple(shape), generator=g) < 0.05
    return torch.where(few, torch.randn(tuple(shape), generator=g), values).to(dtype)


def lattice(g: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Small integers: their products and sums are exact, and answers are compared bit for bit."""
    return integers(g, shape, -7, 7, dtype)


def max_finite(g: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The largest finite numbers and what is close to them, with signs."""
    share = torch.tensor([1.0, 1.0, 0.5, 2.0**-3, 1e-3], dtype=torch.float64)
    picked = share[torch.randint(0, len(share), tuple(shape), generator=g)]
    sign = torch.randint(0, 2, tuple(shape), generator=g) * 2.0 - 1.0
    return (picked * sign * torch.finfo(dtype).max).to(dtype)


def e4m3_ties(g: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The numbers of e4m3, the midpoints between them, what is next to a midpoint, and what lies beyond them all."""
    numbers = e4m3_numbers()
    middle = (numbers[1:] + numbers[:-1]) / 2
    near = middle * (1 + torch.finfo(dtype).eps)
    far = torch.tensor([-0.0, 464.0, 465.0, 480.0, 3e4, torch.finfo(dtype).max, torch.inf], dtype=torch.float64)
    every = torch.cat((numbers, middle, near, far, -near, -far))
    return every[torch.randint(0, len(every), tuple(shape), generator=g)].to(dtype)


FAMILIES: Final = MappingProxyType(
    {
        f.__name__.replace("_", " "): f
        for f in (tiny, large, one_channel, shifted, heavy, cancelling, subnormal, signed_zero, lattice)
    }
)
EXTREME: Final = MappingProxyType({"max finite": max_finite})
