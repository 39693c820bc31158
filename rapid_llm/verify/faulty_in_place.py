"""Faults of any op that writes into its arguments: wrappers like those of `faulty.WRAPPERS`, which are for results.

Each lets the right row run and then spoils what it wrote. What a row wrote is what changed, so that an op which writes
a few slots of a large cache is spoilt where it wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels.registry import OpSpec
from rapid_llm.verify.guard import bits
from rapid_llm.verify.ulp import FORMATS, round_to, truncate_to

Fn = Callable[..., Any]
Spoil = Callable[[Tensor, Tensor], None]


def _changed(now: Tensor, before: Tensor) -> Tensor:
    return bits(now.contiguous()) != bits(before.contiguous())


def _last_element_kept(now: Tensor, before: Tensor) -> None:
    """Never writes the last element that is due."""
    places = torch.nonzero(_changed(now, before))
    if len(places):
        at = tuple(places[-1].tolist())
        now[at] = before[at]


def _last_row_kept(now: Tensor, before: Tensor) -> None:
    """Never writes the last row that is due."""
    places = torch.nonzero(_changed(now, before))
    if len(places) and now.dim() > 1:
        now[int(places[-1, 0])] = before[int(places[-1, 0])]


def _nothing_written(now: Tensor, before: Tensor) -> None:
    now.copy_(before)


def _nan_swallowed(now: Tensor, before: Tensor) -> None:
    """Lets a maximum or a clamp turn NaN into a number."""
    if now.dtype.is_floating_point:
        wide = now.double()  # fp8 has no arithmetic
        now.copy_(torch.where(_changed(now, before).view(now.shape) & torch.isnan(wide), 0.0, wide))


def _a_share(now: Tensor, before: Tensor) -> None:
    """0.3 of what is due."""
    if now.dtype.is_floating_point:
        wide = now.double()
        now.copy_(torch.where(_changed(now, before).view(now.shape), wide * 0.3, wide))


def _past_the_end(now: Tensor, before: Tensor) -> None:
    """Stores one element too many."""
    del before
    if now.numel() and now.is_contiguous():
        now.as_strided((now.numel() + 1,), (1,), now.storage_offset())[-1] = 0


SPOILS: Final[dict[str, Spoil]] = {
    "tail unwritten": _last_element_kept,
    "last row unwritten": _last_row_kept,
    "output unwritten": _nothing_written,
    "NaN swallowed": _nan_swallowed,
    "0.3 of the answer": _a_share,
    "stray write": _past_the_end,
}
FAULTS: Final = (*SPOILS, "one output unwritten", "input strides ignored", "input changed")


def wrapped(op: OpSpec, fault: str, fn: Fn) -> Fn:
    """`fn`, which is a right row of the in-place op `op`, with the fault."""
    names = [a.name for a in op.parsed.positional]
    mutated = op.parsed.mutated
    others = [a.name for a in op.parsed.tensors if a.name not in mutated]

    def run(*args: Any, **keywords: Any) -> None:
        values = {**dict(zip(names, args, strict=False)), **keywords}
        before = {name: values[name].clone() for name in mutated}
        if fault == "input strides ignored":
            args = (_dense(args[0]), *args[1:])
        fn(*args, **keywords)
        if fault == "input changed":
            for name in others:
                if values[name] is not None and values[name].numel() and values[name].dtype.is_floating_point:
                    values[name][(0,) * values[name].dim()] = 3
        for name in mutated[-1:] if fault == "one output unwritten" else mutated:
            spoil = _nothing_written if fault == "one output unwritten" else SPOILS.get(fault)
            if spoil is not None:
                spoil(values[name], before[name])

    run.__name__ = f"{op.function} ({fault})"
    return run


def truncating(op: OpSpec, fn: Fn, dtype: torch.dtype) -> Fn:
    """A row that computes in fp32 and cuts the low bits off at the store."""
    names = [a.name for a in op.parsed.positional]

    def run(*args: Any, **keywords: Any) -> None:
        values = {**dict(zip(names, args, strict=False)), **keywords}
        wide = {k: v.float() if isinstance(v, Tensor) and v.dtype in FORMATS else v for k, v in values.items()}
        before = {name: wide[name].clone() for name in op.parsed.mutated if isinstance(wide[name], Tensor)}
        fn(**wide)
        for name, old in before.items():
            if values[name].dtype in FORMATS:
                cut = round_to(truncate_to(wide[name].double(), dtype), dtype).to(dtype)
                values[name].copy_(torch.where(_changed(wide[name], old).view(old.shape), cut, values[name]))

    run.__name__ = f"{op.function} (truncates)"
    return run


def _dense(tensor: Tensor) -> Tensor:
    """The memory of `tensor` read as if it were dense; the tensor itself where that would leave its storage."""
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    if reach < tensor.numel():
        return tensor
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride(), tensor.storage_offset())
