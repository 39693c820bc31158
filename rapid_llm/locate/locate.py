"""From two configurations to the rows that are to blame: whole model, layer, op, row.

Model runs: each side once; side a once more with side b's rows beside it; if no row is out of its bound on a's inputs
and the logits differ by more than rounding usually explains, side b with a's rows beside it; then runs of side a with
some of b's rows in it. One guilty row of n takes at most log2(n) + 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import DTYPES
from rapid_llm.models.gguf import GGUFFile

from .calls import Watch
from .configuration import Configuration, Side, build
from .diagnosis import Diagnosis, WholeModel, distance, guilty_rows, layer_errors, op_errors
from .reference import FedLayers, OwnErrors, Reference
from .search import smallest
from .steps import Plan, differences, every_row, plan
from .watches import Exhibit, Mixed, Recorder, Shadow, Suspect

SHARE: Final = 0.5
"""Of the logits' difference, what a set of rows must bring about to explain it."""

ODD: Final = 0.1
"""Relative difference of a layer's output, fed the same as the reference's layer, that no rounding brings about: bf16
throughout gives a tenth of it."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """A diagnosis, and the worst call of each row that is out of its bound."""

    diagnosis: Diagnosis
    exhibits: tuple[Exhibit, ...]
    devices: tuple[torch.device, torch.device]


@dataclass(slots=True)
class _Runs:
    """Counts model runs."""

    plan: Plan
    progress: Progress
    count: int = 0

    def run(self, side: Side, watch: Watch, what: str) -> list[Tensor]:
        self.count += 1
        self.progress(f"model run {self.count}: {what}")
        return self.plan.run(side, watch)


def locate(
    file: GGUFFile,
    config: ModelConfig,
    a: Configuration,
    b: Configuration,
    prompts: Sequence[Sequence[int]],
    *,
    progress: Progress = lambda text: None,
) -> Located:
    """Compare two configurations of the model in `file` on the same prompts (token ids).

    Raises the errors of loading and dispatch, and `ValueError` for a row that runs no call of the model.
    """
    if b.reference:
        raise ValueError("hf is the reference: give it as side a")
    with torch.inference_mode():
        side_b = build(file, config, b)
        if a.reference:
            return compare_reference(Reference(file), side_b, prompts, progress=progress)
        return compare_sides(build(file, config, a), side_b, prompts, progress=progress)


def compare_sides(
    a: Side, b: Side, prompts: Sequence[Sequence[int]], *, progress: Progress = lambda text: None
) -> Located:
    """`locate` on sides that are built already."""
    at_issue = differences(a, b)
    runs = _Runs(plan(prompts, at_issue, b.decoder.config.max_model_len, b.decoder.ranges), progress)
    steps = tuple(map(str, runs.plan.steps))
    seen_a, seen_b = Recorder(a), Recorder(b)
    logits_a = runs.run(a, seen_a, "side a")
    logits_b = runs.run(b, seen_b, "side b")
    whole = WholeModel.of(logits_a, logits_b)
    shadow = Shadow(a, b, seen_b.calls, progress=progress)
    runs.run(a, shadow, "side a, and each of b's rows on the same inputs")
    if not shadow.exhibits and whole.difference > _usual(a, b):
        shadow = Shadow(b, a, seen_a.calls, reverse=True, progress=progress)
        runs.run(b, shadow, "side b, and each of a's rows on the same inputs")
    findings = shadow.findings
    bad = [f for f in findings if any(c is not None and not c.ok for c in (f.check_a, f.check_b))]
    suspected = list(dict.fromkeys(Suspect(f.op, f.row_b) for f in bad))
    every = list(dict.fromkeys([*suspected, *(Suspect(f.op, f.row_b) for f in findings)]))
    explains: tuple[Suspect, ...] = ()
    if bad and whole.difference > 0.0:
        explains = _smallest(runs, a, b, seen_b, logits_a, whole.difference, every, len(suspected))
    reached = {(s.op, s.row) for s in every}
    missed = {(op, row) for found in at_issue.values() for op, _, row in found} - reached
    diagnosis = Diagnosis(
        a=str(a),
        b=str(b),
        steps=steps,
        whole=whole,
        layers=layer_errors(findings, seen_a.streams, seen_b.streams),
        ops=op_errors(findings),
        guilty=guilty_rows(findings, steps),
        explains=tuple(map(str, explains)),
        rows=len(every),
        runs=runs.count,
        limit=_limit(len(every)),
        unreached=tuple(sorted(row for _, row in missed)),
    )
    exhibits = sorted(shadow.exhibits.values(), key=lambda e: -e.check.ratio)
    return Located(diagnosis, tuple(exhibits), (a.device, b.device))


def compare_reference(
    reference: Reference, b: Side, prompts: Sequence[Sequence[int]], *, progress: Progress = lambda text: None
) -> Located:
    """`locate` against a reference that has layers and no rows."""
    at_issue = every_row(b)
    runs = _Runs(plan(prompts, at_issue, b.decoder.config.max_model_len, b.decoder.ranges), progress)
    seen = Recorder(b)
    logits = runs.run(b, seen, "side b")
    runs.count += 1
    progress(f"model run {runs.count}: the reference")
    logits_a, streams = reference.run(runs.plan)
    last = b.decoder.config.num_layers - 1
    fed = FedLayers(b, streams)
    runs.run(b, fed, "side b, each layer fed by the reference")
    own = OwnErrors(b, progress)
    runs.run(b, own, "side b, each row against the truth")
    steps = tuple(map(str, runs.plan.steps))
    guilty = guilty_rows(own.findings, steps)
    reached = {(f.op, f.row_b) for f in own.findings}
    missed = {(op, row) for found in at_issue.values() for op, _, row in found} - reached
    # What the reference gives after its last layer is normalised already.
    ours = {**seen.streams, **{(step, last): hidden for step, hidden in seen.final.items()}}
    diagnosis = Diagnosis(
        a="hf (transformers, float32 on cpu)",
        b=str(b),
        steps=steps,
        whole=WholeModel.of(logits_a, logits),
        layers=layer_errors(own.findings, streams, ours, fed.own),
        ops=op_errors(own.findings),
        guilty=guilty,
        explains=(),
        rows=len(reached),
        runs=runs.count,
        limit=_limit(len(reached)),
        unreached=tuple(sorted(row for _, row in missed)),
        odd_layers=() if guilty else tuple(i for i, gap in fed.own.items() if not gap <= ODD),
    )
    return Located(diagnosis, tuple(own.exhibits.values()), (torch.device("cpu"), b.device))


def _limit(rows: int) -> int:
    return math.ceil(math.log2(max(rows, 1))) + 5


def _smallest(
    runs: _Runs,
    a: Side,
    b: Side,
    seen_b: Recorder,
    logits_a: Sequence[Tensor],
    whole: float,
    candidates: Sequence[Suspect],
    suspected: int,
) -> tuple[Suspect, ...]:
    """The fewest of b's rows whose swap into a brings about `SHARE` of the difference."""

    def explains(swapped: tuple[Suspect, ...]) -> bool:
        names = ", ".join(map(str, swapped))
        found = distance(logits_a, runs.run(a, Mixed(a, b, seen_b.calls, swapped), f"side a with {names}"))
        return found >= SHARE * whole

    return smallest(candidates, suspected, explains)


def _usual(a: Side, b: Side) -> float:
    """The square root of the coarsest unit that activations or declared roundings have. It decides how much is looked
    at, never the verdict."""
    units = [torch.finfo(side.dtype).eps for side in (a, b)]
    for side in (a, b):
        labels = {r.partition(":")[2] for _, _, handle in side.decoder.bindings() for r in handle.spec.roundings}
        units += [torch.finfo(DTYPES[label]).eps for label in labels if label in DTYPES]
    return math.sqrt(max(units))
