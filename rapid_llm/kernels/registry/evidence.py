"""What is known about a row's correctness on a class of devices.

Only a run makes evidence. A row of this package counts as verified on CPU because the conformance suite runs it there
on every change; any other row needs a record made in this process by `rapid_llm.verify`. A `GoldenRecord` in a row is a
claim and admits nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from . import registry
from .facts import Facts
from .spec import KernelSpec

_lock: Final = threading.Lock()
_records: Final[dict[tuple[str, str, str], Evidence]] = {}
_version = [0]


@dataclass(frozen=True, slots=True)
class Evidence:
    """state: `floor`, `suite`, `record` or `unverified`. The rest is what the record's run saw."""

    state: str
    text: str
    cases: int = 0
    worst_ulp: float | None = None
    worst_ratio: float | None = None

    @property
    def verified(self) -> bool:
        return self.state != "unverified"

    def as_json(self) -> dict[str, object]:
        return {
            "state": self.state,
            "text": self.text,
            "cases": self.cases,
            "worst_ulp": self.worst_ulp,
            "worst_ratio": self.worst_ratio,
        }


def record(row: str, device: str, dtype: str, *, cases: int, worst_ulp: float, worst_ratio: float) -> None:
    """Keep, for this process, that a conformance run proved `row` on this device type and dtype."""
    if cases < 1:
        raise ValueError(f"{row}: {cases} cases prove nothing")
    text = f"conformance run in this process, {cases} cases, worst error {worst_ratio:.3g} of its bound"
    with _lock:
        _records[row, device, dtype] = Evidence("record", text, cases, worst_ulp, worst_ratio)
        _version[0] += 1


def forget(row: str) -> None:
    """Drop the records of a row."""
    with _lock:
        for key in [k for k in _records if k[0] == row]:
            del _records[key]
        _version[0] += 1


def version() -> int:
    """A number that grows with every record."""
    return _version[0]


def of(spec: KernelSpec, facts: Facts) -> Evidence:
    """What is known about `spec` for a call like `facts`."""
    known = _records.get((spec.name, facts.device, facts.dtype or ""))
    if known is not None:
        return known
    if spec.is_native:
        return Evidence("floor", "the floor of its op")
    if facts.device == "cpu" and registry.is_shipped(spec.name):
        return Evidence("suite", "proven on CPU by the conformance suite that runs on every change")
    if spec.golden is not None and spec.golden.verified:
        return Evidence("unverified", "the row claims to be verified, but no run on this kind of device proved it")
    return Evidence("unverified", "no run on this kind of device has proved it")
