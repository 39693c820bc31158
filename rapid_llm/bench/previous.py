"""A sweep against an earlier one: ratios are compared, never times, for two runs see two machines.

Each arm is held against a reference arm of its own run. The reference should be code that did not change in between: a
peer, where both runs measured one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .stats import MARGIN, Spread, Verdict, pair_ratios, spread
from .sweep import CaseResult

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Change:
    """One arm of one case: its ratio to `reference` now over the ratio then."""

    case: str
    arm: str
    reference: str
    ratio: float
    low: float
    high: float
    verdict: Verdict

    def __str__(self) -> str:
        return (
            f"{self.case}: {self.arm} against {self.reference}: {self.ratio:.3f} of the earlier ratio "
            f"({self.low:.3f} to {self.high:.3f}): {self.verdict}"
        )


def load(path: Path) -> dict[str, Any]:
    """An earlier result file; raises `ValueError` if it is none of these."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--compare {path}: {error}") from None
    if not isinstance(record, dict) or record.get("kernel_schema") != SCHEMA:
        raise ValueError(f"--compare {path}: not a kernel benchmark's result file of schema {SCHEMA}")
    return record


def changes(cases: Sequence[CaseResult], earlier: Mapping[str, Any]) -> Iterator[Change]:
    """A change for every arm that both runs measured, but the reference itself."""
    before = {_key(case["parameters"]): case.get("arms", {}) for case in earlier["cases"]}
    for case in cases:
        old = before.get(_key(case.parameters), {})
        if case.comparison is None or not old:
            continue
        now = {name: result.samples for name, result in case.comparison.results.items()}
        common = [name for name in now if name in old]
        reference = _reference(common, case.comparison.baseline)
        if reference is None:
            continue
        for name in common:
            if name != reference:
                new_ratio = _ratios(now[name], now[reference])
                old_ratio = _ratios(old[name]["samples"], old[reference]["samples"])
                yield _change(case.title, name, reference, new_ratio, old_ratio)


def compared(cases: Sequence[CaseResult], earlier: Mapping[str, Any]) -> list[Change]:
    return list(changes(cases, earlier))


def _reference(common: Sequence[str], baseline: str) -> str | None:
    """A peer that is no row of this package, else the baseline, else nothing."""
    peers = [name for name in common if "/" not in name]
    if peers:
        return "torch" if "torch" in peers else sorted(peers)[0]
    return baseline if baseline in common and len(common) > 1 else None


def _ratios(arm: Sequence[float], reference: Sequence[float]) -> Spread:
    count = min(len(arm), len(reference)) // 2 * 2
    return spread(pair_ratios(arm[:count], reference[:count]))


def _change(case: str, arm: str, reference: str, now: Spread, then: Spread) -> Change:
    ratio, low, high = now.median / then.median, now.low / then.high, now.high / then.low
    word: Verdict = "UNDECIDED"
    if high < 1 - MARGIN:
        word = "FAST"
    elif low > 1 + MARGIN:
        word = "SLOW"
    elif low >= 1 - MARGIN and high <= 1 + MARGIN:
        word = "SAME"
    return Change(case, arm, reference, ratio, low, high, word)


def _key(parameters: Mapping[str, Any]) -> str:
    return json.dumps(parameters, sort_keys=True, default=str)
