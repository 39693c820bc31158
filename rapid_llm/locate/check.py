"""One call against the truth: its own error, on the inputs that it was given, against the bound derived for its row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels.registry import get_op, get_row, probes
from rapid_llm.models.weights import Weight
from rapid_llm.verify.compare import compare
from rapid_llm.verify.guard import Guarded

from .calls import MOVING, Call, Values, copied, dtype_of

COLUMNS: Final = 48
"""Columns of a wide linear whose truth is computed: those that differ most. Exact products of a whole model's weights
take minutes, and what differs less cannot be what is looked for."""


@dataclass(frozen=True, slots=True)
class Check:
    """ratio: the worst error as a share of its bound (1 is the limit; infinite for NaN or a stray write). ulp: the
    worst error in ulps of the output. problem: what is wrong, if anything."""

    ratio: float
    ulp: float
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None


class Truth:
    """The oracle's answer to one call.

    values: the arguments before the call. weight: the matrix as loaded, which stands for whatever form the row reads.
    columns: of a linear's result, those to look at; each depends on a row of the weight of its own, so the others need
    not be computed.
    """

    def __init__(
        self, op: str, values: Mapping[str, Any], weight: Weight | None, columns: Tensor | None = None
    ) -> None:
        own = dict(values) if weight is None else {**values, "weight": weight.data}
        self._op = get_op(op)
        self.values: Values = {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in own.items()}
        self._columns = columns
        self._read = self.values if columns is None else _rows_of_weight(self.values, columns)
        self._expected: Any = probes.load(self._op.oracle)(**self._read)
        self._bounds: dict[tuple[str, ...], Sequence[Tensor]] = {}

    def check(self, row: str, results: Sequence[Tensor]) -> Check:
        """Compare what `row` computed from these values."""
        roundings = get_row(row).roundings
        if roundings not in self._bounds:
            self._bounds[roundings] = probes.load(self._op.bound)(self._read, self._expected, roundings)
        expected = (self._expected,) if isinstance(self._expected, Tensor) else self._expected
        names = self._op.parsed.mutated or ("",) * len(results)
        ratio = ulp = 0.0
        problems = []
        for name, got, want, bound in zip(names, results, expected, self._bounds[roundings], strict=True):
            result = got.detach().cpu()
            found = compare(result if self._columns is None else result[..., self._columns], want, bound)
            ratio, ulp = max(ratio, found.worst_ratio), max(ulp, found.worst_ulp)
            if found.problem is not None:
                problems.append(f"{name}: {found.problem}" if name else self._placed(found.problem))
        if problems and ratio <= 1.0:  # NaN, an infinity, or a shape: no distance
            ratio = math.inf
        return Check(ratio, ulp, "; ".join(problems) or None)

    def _placed(self, problem: str) -> str:
        """`problem`, whose indices count within `columns`."""
        if self._columns is None:
            return problem
        listed = ", ".join(map(str, self._columns[:4].tolist()))
        return f"{problem} (of {len(self._columns)} columns looked at, which are {listed}, ...)"


def _rows_of_weight(values: Values, columns: Tensor) -> Values:
    bias = values.get("bias")
    cut = {"weight": values["weight"][columns], "bias": None if bias is None else bias[columns]}
    return {**values, **cut}


def worst_columns(op: str, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor | None:
    """Of two linears' results, the columns that differ most relative to their own size, and some at even distances, the
    last among them; None for other ops and for few columns, where everything is looked at."""
    if op != "linear" or a[0].shape[-1] <= 2 * COLUMNS:
        return None
    one, other = (t[0].detach().to("cpu", torch.float64).flatten(0, -2) for t in (a, b))
    gap = torch.nan_to_num((one - other).abs(), nan=math.inf, posinf=math.inf).amax(0)
    size = torch.nan_to_num(one.square().mean(0).sqrt(), nan=0.0).clamp_min(1e-30)
    worst = (gap / size).topk(COLUMNS).indices
    spread = torch.linspace(0, one.shape[-1] - 1, COLUMNS // 4).long()
    return torch.cat((worst, spread)).unique()


@dataclass(frozen=True, slots=True)
class Trial:
    """A row's results on private copies, and what it did beyond computing them."""

    results: tuple[Tensor, ...]
    trespass: str | None

    def judged(self, check: Check) -> Check:
        """`check`, made worse by a trespass."""
        if self.trespass is None:
            return check
        return Check(math.inf, check.ulp, "; ".join(filter(None, (self.trespass, check.problem))))


def attempt(call: Call, dtype: torch.dtype, device: torch.device) -> Trial:
    """Run `call` on copies of its step's arguments as `dtype` on `device`, in poisoned memory that is looked at after
    the call, with their strides and alignment. Raises `RowFailure` for whatever the row raises."""
    given = {k: v for k, v in call.values.items() if _moving_tensor(k, v)}
    guards = {k: Guarded(copied(v, dtype_of(k, dtype), device)) for k, v in given.items()}
    returned = Call(call.op, call.row, call.fn, {**call.values, **{k: g.tensor for k, g in guards.items()}}).run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    mutated = get_op(call.op).parsed.mutated
    wrong = []
    for name, guard in guards.items():
        if name in mutated and guard.stray():
            wrong.append(f"{guard.stray()} elements around {name} were written")
        elif name not in mutated and guard.changed():
            wrong.append(f"{guard.changed()} elements in or around {name}, which is only read, were changed")
    several = returned if isinstance(returned, tuple) else (returned,)
    return Trial(tuple(guards[name].tensor for name in mutated) if mutated else several, "; ".join(wrong) or None)


def _moving_tensor(name: str, value: Any) -> bool:
    return name in MOVING and isinstance(value, Tensor)


def difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Distance of two results relative to the first, in the 2-norm over all elements; infinite where NaN or infinity
    stands in one alone."""
    total = norm = 0.0
    for x, y in zip(a, b, strict=True):
        u, v = x.detach().to("cpu", torch.float64), y.detach().to("cpu", torch.float64)
        if u.shape != v.shape:
            return math.inf
        finite = torch.isfinite(u)
        if not torch.equal(finite, torch.isfinite(v)):
            return math.inf
        zero = torch.zeros_like(u)
        total += float(torch.where(finite, u - v, zero).square().sum())
        norm += float(torch.where(finite, u, zero).square().sum())
    if total == 0.0:
        return 0.0
    return math.sqrt(total / norm) if norm > 0.0 else math.inf
