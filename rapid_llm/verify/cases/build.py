"""What cases are made of: values, layouts, and the `Case` itself.

Values are drawn on the CPU from the case's generator, so that a seed means the same numbers on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from rapid_llm.verify.ulp import LABELS, format_of

Device: TypeAlias = torch.device | str
"""Where a case's tensors are put."""

BUDGETS: Final = ("full", "interpret")

FAR: Final = 1 << 31
"""A stride beyond what an int32 offset can hold."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an op, to be made with fresh values for every seed.

    make: generator -> arguments by schema name. outs: further ways to pass `out`, besides none and a contiguous
    tensor: `strided` (a gap after every element), `parted` (see `lay`), `is:<argument>` (the very argument) and
    `overlap:<argument>` (a shifted part of it, which must be refused); `try is:` and `try overlap:` for an op that
    speaks of neither, which may refuse, or be right. raises: what the call must raise instead of answering. seeds: how
    many of the run's seeds it takes, None for all.
    """

    id: str
    make: Callable[[torch.Generator], dict[str, Any]]
    outs: tuple[str, ...] = ()
    raises: tuple[type[BaseException], ...] = ()
    seeds: int | None = None

    @property
    def vast(self) -> bool:
        """Whether its tensors span gigabytes."""
        return self.id.startswith("beyond 2^31")


def check_budget(budget: str) -> bool:
    """True for the full set; raises `ValueError` on a word that isn't a budget."""
    if budget not in BUDGETS:
        raise ValueError(f"unknown budget {budget!r}; known: {', '.join(BUDGETS)}")
    return budget == "full"


def torch_dtype(label: str) -> torch.dtype:
    """The torch dtype of a label."""
    try:
        return LABELS[label]
    except KeyError:
        raise ValueError(f"unknown dtype label {label!r}; known: {', '.join(LABELS)}") from None


def normal(g: torch.Generator, shape: Sequence[int], dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    """Normal values times `spread`."""
    return (torch.randn(tuple(shape), generator=g) * spread).to(dtype)


def integers(g: torch.Generator, shape: Sequence[int], low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Integers in [low, high], as `dtype`."""
    return torch.randint(low, high + 1, tuple(shape), generator=g).to(dtype)


def wide(g: torch.Generator, shape: Sequence[int], dtype: torch.dtype, low: int, high: int) -> Tensor:
    """Values whose exponents are spread evenly over [low, high], clipped to the format's normal range."""
    fmt = format_of(dtype)
    low, high = max(low, fmt.emin), min(high, fmt.emax)
    exponent = torch.randint(low, high + 1, tuple(shape), generator=g).to(torch.float64)
    sign = torch.randint(0, 2, tuple(shape), generator=g) * 2.0 - 1.0
    fraction = 1.0 + torch.rand(tuple(shape), generator=g, dtype=torch.float64) * 0.99
    return (sign * fraction * torch.exp2(exponent)).to(dtype)


def every_bit_pattern(g: torch.Generator, count: int, dtype: torch.dtype) -> Tensor:
    """`count` random bit patterns of `dtype`: subnormals, infinities and NaN among them. All 2**16 if `count` is
    that."""
    if dtype == torch.float32:
        return torch.randint(-(2**31), 2**31, (count,), generator=g, dtype=torch.int64).to(torch.int32).view(dtype)
    if count == 1 << 16:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.randint(-(2**15), 2**15, (count,), generator=g, dtype=torch.int32).to(torch.int16).view(dtype)


def edges(dtype: torch.dtype) -> Tensor:
    """Zeros, the smallest subnormal, the normal limits, infinities and NaN, with signs."""
    info = torch.finfo(dtype)
    fmt = format_of(dtype)
    smallest = 2.0 ** (fmt.emin - fmt.precision + 1)
    values = [0.0, smallest, info.tiny - smallest, info.tiny, 1.0, info.max, float("inf"), float("nan")]
    both = torch.tensor([*values, *(-v for v in values)], dtype=torch.float64)
    return both.to(dtype)


def lay(values: Tensor, layout: str, device: Device) -> Tensor:
    """`values` on `device` as a view of the asked layout; the values are the same, but for `expanded`.

    contiguous; `offset`: contiguous, one element off every alignment; `sliced`: each row is part of a longer one;
    `parted`: so is each group of rows, which then are not evenly spaced; rows of whole vectors begin at multiples of 16
    bytes; `stepped`: every other element of the last dimension; `transposed`: the last two dimensions swapped in
    memory; `outer`: the first two dimensions swapped in memory; `expanded`: row 0 repeated by a stride of 0; `far`:
    rows more than 2**31 elements apart.
    """
    if layout == "contiguous":
        return values.contiguous().to(device)
    if layout == "expanded":
        return values[:1].to(device).expand(values.shape)
    shape = values.shape
    if layout == "offset":
        # Rows of block-quantised bytes start on even addresses wherever they are cut.
        step = 2 if values.dtype == torch.uint8 else 1
        view = torch.zeros(values.numel() + step, dtype=values.dtype, device=device)[step:].view(shape)
    elif layout == "sliced":
        view = torch.zeros(*shape[:-1], shape[-1] + 24, dtype=values.dtype, device=device)[..., 8 : 8 + shape[-1]]
    elif layout == "parted":
        view = parted(torch.zeros(parted_shape(shape), dtype=values.dtype, device=device), shape)
    elif layout == "stepped":
        view = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=values.dtype, device=device)[..., ::2]
    elif layout == "transposed":
        view = torch.zeros(*shape[:-2], shape[-1], shape[-2], dtype=values.dtype, device=device).transpose(-1, -2)
    elif layout == "outer":
        view = torch.zeros(shape[1], shape[0], *shape[2:], dtype=values.dtype, device=device).transpose(0, 1)
    elif layout == "far":
        view = far(shape, values.dtype, device)
    else:
        raise ValueError(f"unknown layout {layout!r}")
    return view.copy_(values)


def parted_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The storage of which `parted` of this shape is a view."""
    groups = (*shape[:-2], shape[-2] + 2) if len(shape) > 1 else ()
    return (*groups, shape[-1] + 32)


def parted(storage: Tensor, shape: Sequence[int]) -> Tensor:
    """The inner part of a storage of `parted_shape(shape)`."""
    rows = storage[..., 8 : 8 + shape[-1]]
    return rows[..., 1 : 1 + shape[-2], :] if len(shape) > 1 else rows


def lay_heads(values: Tensor, layout: str, device: Device) -> Tensor:
    """As `lay` for (tokens, heads, head_dim), and `fused`: a token's heads are part of a longer row, as in a qkv
    result."""
    if layout != "fused":
        return lay(values, layout, device)
    tokens, heads, dim = values.shape
    rows = torch.zeros(tokens, (heads + 2) * dim, dtype=values.dtype, device=device)
    return rows[:, dim : (heads + 1) * dim].view(tokens, heads, dim).copy_(values)


def far(shape: Sequence[int], dtype: torch.dtype, device: Device) -> Tensor:
    """An uninitialised view whose first dimension strides so far that its last index starts at or beyond 2**31
    elements.

    The gaps are never touched, so on the CPU they cost address space, not memory.
    """
    inner = 1
    strides = [0] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim] = inner
        inner *= shape[dim]
    strides[0] = -(-FAR // max(shape[0] - 1, 1)) + 16
    storage = torch.empty((shape[0] - 1) * strides[0] + inner, dtype=dtype, device=device)
    return storage.as_strided(tuple(shape), strides)
