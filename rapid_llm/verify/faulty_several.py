"""Faults of any op that returns several tensors: those of `faulty.WRAPPERS` on each of them, or on the last alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.verify.faulty import WRAPPERS

Fn = Callable[..., Any]

_EACH: Final = (
    *("tail unwritten", "last row unwritten", "output unwritten", "input strides ignored", "NaN swallowed"),
    *("input changed", "result is a view"),
)
FAULTS: Final = (*_EACH, "0.3 of the answer", "one output unwritten", "one output returned", "answers from memory")


def wrapped(fault: str, fn: Fn) -> Fn:
    """`fn`, which is a right row of an op with several results, with the fault."""
    memory: dict[Any, tuple[Tensor, ...]] = {}

    def run(*args: Any, **keywords: Any) -> Any:
        right: tuple[Tensor, ...] = fn(*args, **keywords)
        if fault == "one output returned":
            return right[0]
        if fault == "one output unwritten":
            return (*right[:-1], torch.empty_like(right[-1]))
        if fault == "0.3 of the answer":
            return tuple(t * 0.3 if t.dtype.is_floating_point else t for t in right)
        if fault == "answers from memory":
            key = (args[0].data_ptr(), args[0].shape, args[0].stride(), *(a for a in args if not isinstance(a, Tensor)))
            return tuple(t.clone() for t in memory.setdefault(key, right))
        wrapper = WRAPPERS[fault]
        several = range(len(right))
        return tuple(wrapper(lambda *a, i=i, **k: fn(*a, **k)[i], args, None, keywords) for i in several)

    run.__name__ = f"{fn.__name__} ({fault})"
    return run
