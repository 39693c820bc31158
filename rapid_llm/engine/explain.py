"""Which row runs each op of an engine, where, and why: as a report to read and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rapid_llm.kernels import Explanation, Selected

WORTH_TELLING: Final = ("unavailable", "broken", "unverified", "stale", "quarantined", "rounding")
"""Codes of reasons that a user could do something about; that a row is for another dtype or shape is no news."""


@dataclass(frozen=True, slots=True)
class Binding:
    """One choice. where: the sizes it holds for. what: the op, with its scheme and features where it has them."""

    where: str
    op: str
    what: str
    row: str
    explanation: Explanation

    @classmethod
    def of(cls, where: str, op: str, handle: Selected) -> Binding:
        return cls(where, op, _what(op, handle.decision.facts), handle.spec.name, handle.explain())

    @classmethod
    def planned(cls, where: str, op: str, explanation: Explanation) -> Binding:
        """A choice that was explained and not made; `row` is empty where no row can run the call."""
        return cls(where, op, _what(op, explanation.facts), explanation.selected or "", explanation)

    @property
    def kind(self) -> str:
        """`what` without the features."""
        scheme = self.explanation.facts.scheme
        return self.op if scheme is None else f"{self.op} {scheme}"

    @property
    def why(self) -> str:
        """In a line: what proves the row, who forced it, and what it rounds."""
        if self.explanation.selected is None:
            return str(self.explanation.error).splitlines()[0]
        chosen = next(v for v in self.explanation.rows if v.row.name == self.row)
        parts = [chosen.evidence.text]
        if self.explanation.forced is not None:
            parts.insert(0, f"forced by {self.explanation.forced.by}")
        if chosen.row.roundings:
            parts.append(f"rounds {', '.join(chosen.row.roundings)}")
        return "; ".join((*parts, *chosen.notes))

    def json(self) -> dict[str, Any]:
        """`op, what, where, row, why`."""
        return {"op": self.op, "what": self.what, "where": self.where, "row": self.row, "why": self.why}

    def losses(self) -> Iterable[tuple[str, str]]:
        """(row, reason) of rows that a change of the installation or the options would admit."""
        for verdict in self.explanation.rows:
            codes = {reason.code for reason in verdict.reasons}
            if codes == {"rounding"}:
                yield verdict.row.name, f"rounds {', '.join(verdict.row.roundings)}, which dtype='auto' allows on a CPU"
            elif codes and codes <= set(WORTH_TELLING):
                text = "; ".join(f"{reason.text} ({reason.fix})" for reason in verdict.reasons)
                yield verdict.row.name, text


class EngineExplanation:
    """settings: what the engine runs with, as (name, value) in reading order. memory: bytes by use."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        memory: Mapping[str, int],
        bindings: Iterable[tuple[str, str, Selected]],
    ) -> None:
        self.settings = dict(settings)
        self.memory = dict(memory)
        self.bindings = tuple(Binding.of(*binding) for binding in bindings)

    def json(self) -> dict[str, Any]:
        """`settings`, `memory`, and `ops: [{op, what, where, row, why, explanation}]`."""
        return {
            "settings": self.settings,
            "memory": self.memory,
            "ops": [{**b.json(), "explanation": b.explanation.json()} for b in self.bindings],
        }

    def __str__(self) -> str:
        width = max(len(name) for name in self.settings)
        lines = [f"{name:<{width}}  {value}" for name, value in self.settings.items()]
        lines += [f"{'memory':<{width}}  {', '.join(f'{k} {v / 2**20:.1f} MiB' for k, v in self.memory.items())}", ""]
        rows = [("op", "for", "row", "why"), *table(self.bindings)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines += ["  ".join([*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        losses = dict.fromkeys(loss for binding in self.bindings for loss in binding.losses())
        if losses:
            lines += ["", "Rows that are out, and what would admit them:"]
            lines += [f"  {row}: {text}" for row, text in losses]
        return "\n".join(lines)

    __repr__ = __str__


def _what(op: str, facts: Any) -> str:
    """The op, with its scheme and features where it has them."""
    parts = [op] if facts.scheme is None else [op, facts.scheme]
    outputs = next((facts.dims[name] for name in ("out_features", "intermediate") if name in facts.dims), None)
    if "in_features" in facts.dims and outputs is not None:
        parts.append(f"{facts.dims['in_features']} -> {outputs}")
    return " ".join(parts)


def table(bindings: Iterable[Binding]) -> list[tuple[str, str, str, str]]:
    """(op, for, row, why), one line for each op and row that are chosen for the same sizes and the same reason."""
    bindings = tuple(bindings)
    every: dict[str, dict[str, None]] = {}
    chosen: dict[tuple[str, str], dict[str, None]] = {}
    for b in bindings:
        chosen.setdefault((b.what, b.row), {})[b.where] = None
        every.setdefault(b.op, {})[b.where] = None
    lines: dict[tuple[str, str, str, str], set[str]] = {}
    for b in bindings:
        where = chosen[b.what, b.row]
        place = "every size" if where == every[b.op] else ", ".join(where)
        lines.setdefault((b.kind, place, b.row, b.why), set()).add(b.what)
    return [
        (kind if len(whats) == 1 else f"{kind} ({len(whats)} shapes)", place, row, why)
        for (kind, place, row, why), whats in lines.items()
    ]
