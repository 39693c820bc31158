"""Which row runs each op of an engine, where, and why: as a report to read and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rapid_llm.kernels import Explanation, Selected

WORTH_TELLING: Final = ("unavailable", "broken", "unverified", "rounding")
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
        facts = handle.decision.facts
        parts = [op] if facts.scheme is None else [op, facts.scheme]
        if "in_features" in facts.dims:
            parts.append(f"{facts.dims['in_features']} -> {facts.dims['out_features']}")
        return cls(where, op, " ".join(parts), handle.spec.name, handle.explain())

    @property
    def why(self) -> str:
        """In a line: what proves the row, who forced it, and what it rounds."""
        chosen = next(v for v in self.explanation.rows if v.row.name == self.row)
        parts = [chosen.evidence.text]
        if self.explanation.forced is not None:
            parts.insert(0, f"forced by {self.explanation.forced.by}")
        if chosen.row.roundings:
            parts.append(f"rounds {', '.join(chosen.row.roundings)}")
        return "; ".join((*parts, *chosen.notes))

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
            "ops": [
                {
                    "op": b.op,
                    "what": b.what,
                    "where": b.where,
                    "row": b.row,
                    "why": b.why,
                    "explanation": b.explanation.json(),
                }
                for b in self.bindings
            ],
        }

    def __str__(self) -> str:
        width = max(len(name) for name in self.settings)
        lines = [f"{name:<{width}}  {value}" for name, value in self.settings.items()]
        lines += [f"{'memory':<{width}}  {', '.join(f'{k} {v / 2**20:.1f} MiB' for k, v in self.memory.items())}", ""]
        lines += self._table()
        losses = dict.fromkeys(loss for binding in self.bindings for loss in binding.losses())
        if losses:
            lines += ["", "Rows that are out, and what would admit them:"]
            lines += [f"  {row}: {text}" for row, text in losses]
        return "\n".join(lines)

    __repr__ = __str__

    def _table(self) -> list[str]:
        """One line for each op and row, with the sizes for which it is chosen."""
        places: dict[tuple[str, str, str], dict[str, None]] = {}
        everywhere: dict[str, dict[str, None]] = {}
        for b in self.bindings:
            places.setdefault((b.what, b.row, b.why), {})[b.where] = None
            everywhere.setdefault(b.op, {})[b.where] = None
        rows = [("op", "for", "row", "why")]
        for (what, row, why), where in places.items():
            every = where == everywhere[what.split(" ", 1)[0]]
            rows.append((what, "every size" if every else ", ".join(where), row, why))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return ["  ".join([*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
