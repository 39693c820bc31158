"""What a conformance run found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that one call did wrong. `what` is a fixed word (`value`, `stray write`, ...), `detail` the
    particulars."""

    case: str
    seed: int
    call: str
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.case} (seed {self.seed}, {self.call}): {self.what}: {self.detail}"


@dataclass(slots=True)
class Report:
    """The outcome of one row over all its cases; `ok` demands that something was compared and nothing was wrong.

    cases: cases run. refused: cases whose layout the row does not declare, and which it refused with an error, as it
    may. skipped: cases outside of the row's declared shapes. elements: compared elements. worst_ulp: the largest
    error in ulps of the output. worst_ratio: the largest error as a share of its derived bound. worst_norm: the largest
    root mean square of those shares over a row of the output.
    """

    op: str
    row: str
    device: str
    dtype: str
    scheme: str | None
    budget: str
    seeds: tuple[int, ...]
    cases: int = 0
    refused: int = 0
    skipped: int = 0
    calls: int = 0
    elements: int = 0
    worst_ulp: float = 0.0
    worst_ratio: float = 0.0
    worst_norm: float = 0.0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.cases > 0 and self.elements > 0 and not self.failures

    def __str__(self) -> str:
        what = f"{self.row} {self.dtype}" + (f" {self.scheme}" if self.scheme else "") + f" on {self.device}"
        counts = (
            f"{self.cases} cases, {self.calls} calls, {self.elements} elements, worst {self.worst_ulp:.3g} ulp, "
            f"{self.worst_ratio:.3g} of the bound, {self.seconds:.2f} s"
        )
        if self.ok:
            return f"{what}: ok ({counts})"
        if not self.failures:
            return f"{what}: nothing was compared ({counts})"
        shown = "\n  ".join(str(f) for f in self.failures[:8])
        more = f"\n  ... and {len(self.failures) - 8} more" if len(self.failures) > 8 else ""
        return f"{what}: {len(self.failures)} failures ({counts})\n  {shown}{more}"
