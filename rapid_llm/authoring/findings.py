"""What a check finds, and the comments by which a finding is allowed.

`# check: allow <rule>: <reason>` (in C++ after `//`) allows a finding: on its line, in the comment above it, or within
the function that it speaks of. One without a reason, with an unknown rule, or that allows nothing is a finding itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_WAIVER: Final = re.compile(r"(?:#|//)\s*check:\s*allow\s+(?P<rule>[\w-]+)\s*(?::\s*(?P<reason>.*\S))?")
_COMMENT: Final = re.compile(r"^\s*(#|//)")


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One break of a convention. line: where, from 1; last: the end of what it speaks of. fix: what to do."""

    path: Path
    line: int
    rule: str
    text: str
    fix: str
    last: int = 0

    def json(self, root: Path) -> dict[str, object]:
        """As plain data, with the path relative to `root` where it is below."""
        return {
            "file": shown(self.path, root),
            "line": self.line,
            "rule": self.rule,
            "text": self.text,
            "fix": self.fix,
        }


@dataclass(frozen=True, slots=True)
class Waiver:
    """A comment that allows a rule's finding."""

    path: Path
    line: int
    rule: str
    reason: str


def shown(path: Path, root: Path) -> str:
    """A path as a reader of `root` writes it."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def waivers(path: Path, text: str) -> list[Waiver]:
    """Every waiver of a file; text in quotes that only looks like one is none."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _WAIVER.search(line)
        if (
            match is not None
            and line[: match.start()].count('"') % 2 == 0
            and line[: match.start()].count("`") % 2 == 0
        ):
            found.append(Waiver(path, number, match["rule"], match["reason"] or ""))
    return found


def settle(findings: Iterable[Finding], texts: dict[Path, str], rules: Iterable[str]) -> list[Finding]:
    """The findings that no waiver allows, and those about the waivers themselves."""
    known = set(rules)
    left: list[Finding] = []
    given = {path: waivers(path, text) for path, text in texts.items()}
    used: set[Waiver] = set()
    for finding in sorted(set(findings)):
        lines = texts.get(finding.path, "").splitlines()
        here = [w for w in given.get(finding.path, []) if w.rule == finding.rule]
        allowing = [w for w in here if _covers(w.line, finding, lines)]
        used.update(allowing)
        if not allowing:
            left.append(finding)
    for waiver in (w for listed in given.values() for w in listed):
        if waiver.rule not in known:
            text, fix = f"allows {waiver.rule}, which is no rule", f"name one of {', '.join(sorted(known))}"
        elif not waiver.reason:
            text, fix = f"allows {waiver.rule} without saying why", "write the reason after a second colon"
        elif waiver not in used:
            text, fix = f"allows {waiver.rule}, which finds nothing here", "take the comment away"
        else:
            continue
        left.append(Finding(waiver.path, waiver.line, "waiver", text, fix))
    return sorted(left)


def _covers(line: int, finding: Finding, lines: list[str]) -> bool:
    """Whether a comment on `line` speaks of the finding."""
    if finding.line <= line <= max(finding.line, finding.last):
        return True
    above = range(line, finding.line)
    return line < finding.line and all(_COMMENT.match(lines[number - 1]) for number in above)
