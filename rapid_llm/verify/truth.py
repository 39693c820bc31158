"""What a call must give: the oracle's answers on private copies of its arguments, and their bounds."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rapid_llm.kernels.registry import OpSpec, Out, probes
from rapid_llm.kernels.registry.facts import expression_names
from rapid_llm.verify.oracles import OracleError
from rapid_llm.verify.selection import AcceptableIds


@dataclass(slots=True)
class Truth:
    """What one set of values must give: the oracle's answers and their bounds, and the arguments they came from."""

    values: dict[str, Any]
    expected: Any
    bounds: tuple[Tensor, ...]


def truth_of(op: OpSpec, values: dict[str, Any], roundings: tuple[str, ...]) -> Truth:
    """The truth of a call with the arguments `values`, for a row that declares `roundings`."""
    private = {k: v.cpu().clone() if isinstance(v, Tensor) else v for k, v in values.items()}
    expected = probes.load(op.oracle)(**private)
    _check_oracle(op, private, expected)
    return Truth(values, expected, probes.load(op.bound)(private, expected, roundings))


def allocation(op: OpSpec, declared: Out, values: dict[str, Any]) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a result as the op declares it, for the arguments `values`."""
    scope = {"torch": torch, **expression_names()}
    scope |= {a.name: values.get(a.name, a.default) for a in op.parsed.args}
    return tuple(eval(_compiled(declared.shape), scope)), eval(_compiled(declared.dtype), scope)


@functools.cache
def _compiled(expression: str) -> types.CodeType:
    """An expression of a declaration, which every call of every case evaluates."""
    return compile(expression, "<declaration>", "eval")


def _tensors(expected: Any) -> Iterator[Tensor]:
    yield from (expected,) if isinstance(expected, Tensor) else expected


def _check_oracle(op: OpSpec, values: dict[str, Any], expected: Any) -> None:
    """NaN from an oracle whose inputs are all finite would be a hole in the comparison, not an expectation."""
    if isinstance(expected, AcceptableIds):
        if bool((~expected.allowed.any(-1) & ~expected.invalid).any()):
            raise OracleError(f"{op.id}: a row of logits has no acceptable id")
        return
    floats = [v for v in values.values() if isinstance(v, Tensor) and v.dtype.is_floating_point]
    floats = [v.float() if v.element_size() == 1 else v for v in floats]  # torch asks no fp8 whether it is finite
    if all(bool(torch.isfinite(v).all()) for v in floats) and any(
        bool(torch.isnan(e).any()) for e in _tensors(expected)
    ):
        raise OracleError(f"{op.id}: the oracle gave NaN for finite inputs")
