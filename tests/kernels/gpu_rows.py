"""Calls of registered CUDA rows on real tensors, and what they must answer: for tests that ask more than conformance.

A call's arguments come from the cases of its op, its expected result and bound from the oracle, as in
`rapid_llm.verify`; nothing here knows an op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import rapid_llm.kernels.ops  # noqa: F401  (registers the rows)
from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import KernelSpec, OpSpec, probes
from rapid_llm.verify.cases.build import Case
from rapid_llm.verify.compare import compare
from rapid_llm.verify.conformance import unavailable
from rapid_llm.verify.standing import Standing, standing

BUILT = ("jit", "nvrtc", "aot")
"""Backends whose kernels this package compiles for CUDA."""


def built_rows(*backends: str) -> list[KernelSpec]:
    """The registered rows of these backends, by name."""
    return [row for op in registry.ops() for row in registry.rows(op.id) if row.backend in (backends or BUILT)]


def parameters(*backends: str) -> list[Any]:
    """One pytest parameter for each row, named after it."""
    return [pytest.param(row, id=row.name) for row in built_rows(*backends)]


def need(row: KernelSpec) -> Any:
    """The row's function, built; skips with the reason where the row cannot run here."""
    if reason := unavailable(row, "cuda"):
        pytest.skip(f"{row.name}: {reason}")
    return registry.load_target(row.name)


def cases_of(row: KernelSpec, dtype: str, budget: str, device: str = "cuda") -> Iterator[Case]:
    """The cases that the row takes as it declares, in the order of the op, without those that must raise."""
    op = registry.get_op(row.op)
    for scheme in row.schemes or (None,):
        for case in probes.load(op.cases)(dtype, device, scheme, budget=budget):
            if case.raises or case.seeds == 1:  # the latter are the big ones
                continue
            if standing(op, row, case.make(torch.Generator().manual_seed(0))) is Standing.TAKEN:
                yield case


def plain_case(row: KernelSpec, dtype: str, device: str = "cuda") -> Case:
    """The case with the most elements among those that the row takes, whose numbers are finite and a seed's choice."""
    found: Case | None = None
    most = 0
    for case in cases_of(row, dtype, "full", device):
        one, two = (_tensors(case, seed) for seed in (0, 1))
        size = sum(t.numel() for t in one)
        if size <= most or all(torch.equal(a, b) for a, b in zip(one, two, strict=True)):
            continue
        if all(_plain(t) for t in one) and all(t.numel() for t in one):
            found, most = case, size
    if found is None:
        raise LookupError(f"{row.name}: no plain case of {row.op} in {dtype} is one that the row takes")
    return found


def _plain(tensor: Tensor) -> bool:
    """Finite, and without elements that share memory, so that it can be filled anew."""
    once = all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return once and (not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()))


def _tensors(case: Case, seed: int) -> list[Tensor]:
    values = case.make(torch.Generator().manual_seed(seed))
    return [v for v in values.values() if isinstance(v, Tensor)]


@dataclass(slots=True)
class Call:
    """One call of a row: its arguments stay where they are, so that it can be captured, and are filled anew by a seed.

    After `fill`, run it and then `check` what it left: a fresh result, `out`, or the arguments that the op mutates.
    """

    row: KernelSpec
    case: Case
    values: dict[str, Any]
    fresh: dict[str, Any]
    packed: Tensor | None = None

    @classmethod
    def of(cls, row: KernelSpec, dtype: str, device: str = "cuda") -> Call:
        case = plain_case(row, dtype, device)
        values = case.make(torch.Generator().manual_seed(0))
        call = cls(row, case, values, {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()})
        if row.prepack is not None:
            call.packed = probes.load(row.prepack)(values["weight"], values.get("scheme"))
        return call

    @property
    def op(self) -> OpSpec:
        return registry.get_op(self.row.op)

    def fill(self, seed: int) -> None:
        """Other values in the same memory; a packed weight stays what it was."""
        made = self.case.make(torch.Generator().manual_seed(seed))
        if self.packed is not None:
            made["weight"] = self.fresh["weight"]
        self.fresh = made
        for name, value in made.items():
            if isinstance(value, Tensor):
                self.values[name].copy_(value)

    def run(self, function: Any) -> Any:
        """The row's answer; call it under whatever stream, device or capture is to be tested."""
        values = {**self.values, **({} if self.packed is None else {"weight": self.packed})}
        parsed = self.op.parsed
        positional = [values.get(a.name, a.default) for a in parsed.positional]
        return function(*positional, **{a.name: values[a.name] for a in parsed.keyword_only if a.name in values})

    def check(self, result: Any) -> None:
        """Fail unless the result, or what was written in place, is within its bound of the oracle's."""
        returned = list(result) if isinstance(result, tuple) else [result]
        got = [self.values[name] for name in self.op.parsed.mutated] or returned
        check(self.op.id, self.fresh, got, self.row.roundings)


def check(op_id: str, values: dict[str, Any], got: list[Tensor], roundings: tuple[str, ...] = ()) -> None:
    """Fail unless `got` is within its bound of what the oracle says for `values`."""
    op = registry.get_op(op_id)
    private = {k: v.cpu().clone() if isinstance(v, Tensor) else v for k, v in values.items()}
    expected = probes.load(op.oracle)(**private)
    bounds = probes.load(op.bound)(private, expected, roundings)
    wanted = (expected,) if isinstance(expected, Tensor) else expected
    for result, want, bound in zip(got, wanted, bounds, strict=True):
        problem = compare(result.cpu(), want, bound).problem
        assert problem is None, f"{op_id}: {problem}"
