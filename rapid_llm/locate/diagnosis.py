"""What a comparison found, from the whole model down to the row: as data, and as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .calls import Slot
from .check import difference
from .watches import Finding, Suspect


@dataclass(frozen=True, slots=True)
class WholeModel:
    """Logits of all steps: the largest relative difference of a row, how many rows agree on the best token, and the
    largest difference of that token's log-probability."""

    difference: float
    agreeing: int
    rows: int
    logprob: float

    @classmethod
    def of(cls, a: Sequence[Tensor], b: Sequence[Tensor]) -> WholeModel:
        pairs = [(x.double(), y.double()) for x, y in zip(torch.cat(list(a)), torch.cat(list(b)), strict=True)]
        best = [int(x.argmax()) for x, _ in pairs]
        gaps = [
            float((x.log_softmax(-1)[i] - y.log_softmax(-1)[i]).abs()) for (x, y), i in zip(pairs, best, strict=True)
        ]
        return cls(
            distance(a, b),
            sum(int(y.argmax()) == i for (_, y), i in zip(pairs, best, strict=True)),
            len(pairs),
            max(math.inf if math.isnan(gap) else gap for gap in gaps),
        )


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The largest relative difference of two rows of logits."""
    return max(difference([x], [y]) for x, y in zip(torch.cat(list(a)), torch.cat(list(b)), strict=True))


@dataclass(frozen=True, slots=True)
class LayerError:
    """drift: relative difference of the residual stream after the layer, all that came before included. own: the
    largest relative difference that one call of the layer adds, fed the same. ratio: its largest error of side b as a
    share of the bound."""

    layer: int
    drift: float
    own: float
    ratio: float


@dataclass(frozen=True, slots=True)
class OpError:
    """One op's rows over all calls: the worst difference, and the worst error of each as a share of its bound."""

    op: str
    row_a: str
    row_b: str
    calls: int
    equal: int
    difference: float
    ratio_a: float
    ratio_b: float
    worst: str


@dataclass(frozen=True, slots=True)
class Guilty:
    """A row that is out of its bound. layers: where, in order of the model. worst: the call with the largest error."""

    side: str
    op: str
    row: str
    layers: tuple[str, ...]
    places: int
    worst: str
    step: str
    ratio: float
    ulp: float
    problem: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """rows: rows in which the sides differ. explains: the smallest set of side b's rows that, swapped into side a,
    accounts for at least half of the logits' difference. runs: model runs made, and the limit promised.
    unreached: rows in which the sides differ and that no step called. odd_layers: those that differ grossly from a
    reference although every row is within its bound: the model is another one."""

    a: str
    b: str
    steps: tuple[str, ...]
    whole: WholeModel
    layers: tuple[LayerError, ...]
    ops: tuple[OpError, ...]
    guilty: tuple[Guilty, ...]
    explains: tuple[str, ...]
    rows: int
    runs: int
    limit: int
    unreached: tuple[str, ...]
    odd_layers: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every row of both sides is within its bound, and no layer is another one than the reference's."""
        return not self.guilty and not self.odd_layers

    def json(self) -> dict[str, Any]:
        """Plain data; an infinite figure is the text 'inf'."""
        return {"ok": self.ok, **_plain(asdict(self))}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def layer_name(slot: Slot) -> str:
    """The layer, or the part outside of the layers."""
    return slot.name if slot.layer is None else f"layer {slot.layer}"


def layer_errors(
    findings: Iterable[Finding],
    streams_a: dict[tuple[int, int], Tensor],
    streams_b: dict[tuple[int, int], Tensor],
    fed: dict[int, float] | None = None,
) -> tuple[LayerError, ...]:
    """One entry a layer. fed: what each layer adds as a whole, where that was measured."""
    drift: dict[int, float] = {}
    for (step, layer), stream in streams_a.items():
        drift[layer] = max(drift.get(layer, 0.0), difference([stream], [streams_b[step, layer]]))
    own: dict[int, float] = {**dict.fromkeys(drift, 0.0), **(fed or {})}
    ratio: dict[int, float] = dict.fromkeys(drift, 0.0)
    for f in findings:
        at = f.place.slot.layer
        if at is not None:
            own[at] = max(own[at], f.difference)
            ratio[at] = max(ratio[at], 0.0 if f.check_b is None else f.check_b.ratio)
    return tuple(LayerError(i, drift[i], own[i], ratio[i]) for i in sorted(drift))


def op_errors(findings: Iterable[Finding]) -> tuple[OpError, ...]:
    """One entry for each pair of rows, worst first."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for f in findings:
        groups.setdefault((f.op, f.row_a, f.row_b), []).append(f)
    entries = []
    for (op, a, b), found in groups.items():
        worst = max(found, key=lambda f: (_ratio(f), f.difference))
        entries.append(
            OpError(
                op,
                a,
                b,
                len(found),
                sum(f.check_b is None for f in found),
                max(f.difference for f in found),
                max(0.0 if f.check_a is None else f.check_a.ratio for f in found),
                max(0.0 if f.check_b is None else f.check_b.ratio for f in found),
                str(worst.place.slot),
            )
        )
    return tuple(sorted(entries, key=lambda e: (-max(e.ratio_a, e.ratio_b), -e.difference, e.op, e.row_b)))


def guilty_rows(findings: Sequence[Finding], steps: Sequence[str]) -> tuple[Guilty, ...]:
    """Every row with a call out of its bound, worst first."""
    found: dict[tuple[str, Suspect], list[Finding]] = {}
    for f in findings:
        for side, row, check in (("a", f.row_a, f.check_a), ("b", f.row_b, f.check_b)):
            if check is not None and not check.ok:
                found.setdefault((side, Suspect(f.op, row)), []).append(f)
    entries = []
    for (side, suspect), bad in found.items():
        checks = [(f.check_a if side == "a" else f.check_b, f) for f in bad]
        check, worst = max(((c, f) for c, f in checks if c is not None), key=lambda pair: pair[0].ratio)
        slots = dict.fromkeys(f.place.slot for f in sorted(bad, key=lambda f: _order(f.place.slot)))
        entries.append(
            Guilty(
                side,
                suspect.op,
                suspect.row,
                tuple(dict.fromkeys(map(layer_name, slots))),
                len(slots),
                str(worst.place.slot),
                steps[worst.place.step],
                check.ratio,
                check.ulp,
                check.problem or "",
            )
        )
    return tuple(sorted(entries, key=lambda g: (-g.ratio, g.side, g.row)))


def _order(slot: Slot) -> tuple[int, int]:
    """Embedding, layers in order, final norm, head."""
    if slot.layer is not None:
        return 1, slot.layer
    return (0 if slot.name == "embedding" else 2), 0


def _ratio(finding: Finding) -> float:
    return max((c.ratio for c in (finding.check_a, finding.check_b) if c is not None), default=0.0)
