"""A run against an earlier one's result file: which cases became slower.

Where both runs timed a peer, ratios to it are compared, for the peer's code did not change and the machine may have.
Without one, shares of the roofline are: each run's limits were measured in that run. A verdict needs both intervals to
lie wholly on one side.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rapid_llm.bench.stats import MARGIN, Verdict, spread

from .arms import OURS

SCHEMA: Final = 1
KIND: Final = "engine"
SAME: Final = ("name", "dtype", "quantization", "device", "ranks")
"""What of a run's model must agree for its times to be comparable."""

_KEY: Final = ("kind", "batch", "context", "tokens")


@dataclass(frozen=True, slots=True)
class Change:
    """ratio: time now over time then, by `reference`; low, high: what the intervals allow."""

    case: str
    reference: str
    ratio: float
    low: float
    high: float
    verdict: Verdict

    def __str__(self) -> str:
        return (
            f"{self.case}: {self.ratio:.3f} of the earlier time ({self.low:.3f} to {self.high:.3f}) "
            f"beside {self.reference}: {self.verdict}"
        )

    def json(self) -> dict[str, Any]:
        return asdict(self)


def load(path: Path) -> dict[str, Any]:
    """An earlier result file; raises `ValueError` for anything else."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--compare {path}: {error}") from None
    if not isinstance(record, dict) or (record.get("perf_kind"), record.get("perf_schema")) != (KIND, SCHEMA):
        raise ValueError(f"--compare {path}: not a result file of `rapid-llm bench` for an engine, schema {SCHEMA}")
    return record


def check_comparable(now: Mapping[str, Any], then: Mapping[str, Any], path: Path) -> None:
    """Raise `ValueError` where the files are of different models or machines; every difference is named."""
    differing = [
        f"{name} {then['model'].get(name)!r} and {now['model'].get(name)!r}"
        for name in SAME
        if then["model"].get(name) != now["model"].get(name)
    ]
    if then["machine"]["slug"] != now["machine"]["slug"]:
        differing.append(f"machine {then['machine']['slug']!r} and {now['machine']['slug']!r}")
    if differing:
        raise ValueError(f"--compare {path}: the runs are of {', '.join(differing)}, which tells nothing")


def changes(now: Mapping[str, Any], then: Mapping[str, Any]) -> Iterator[Change]:
    """A change for every case that both runs measured."""
    before = {_key(case): case for case in then["cases"] if OURS in case.get("arms", {})}
    for case in now["cases"]:
        old = before.get(_key(case))
        if old is None or OURS not in case.get("arms", {}):
            continue
        peers = [name for name in case["arms"] if name != OURS and name in old["arms"]]
        if peers:
            new_interval, old_interval = (_against(record["arms"], peers[0]) for record in (case, old))
            reference = f"{peers[0]}'s"
        else:
            new_interval, old_interval = _of_limit(case), _of_limit(old)
            reference = "the limits of each run"
        yield _change(_title(case), reference, new_interval, old_interval)


Interval = tuple[float, float, float]
"""(median, low, high) of a ratio of times: ours over the reference's."""


def _against(arms: Mapping[str, Any], peer: str) -> Interval:
    found = spread(m / t for m, t in zip(arms[OURS]["samples"], arms[peer]["samples"], strict=False))
    return found.median, found.low, found.high


def _of_limit(case: Mapping[str, Any]) -> Interval:
    seconds, limit = case["arms"][OURS]["seconds"], case["limit"]["seconds"]
    return seconds["median"] / limit, seconds["low"] / limit, seconds["high"] / limit


def _change(case: str, reference: str, now: Interval, then: Interval) -> Change:
    ratio, low, high = now[0] / then[0], now[1] / then[2], now[2] / then[1]
    word: Verdict = "UNDECIDED"
    if high < 1 - MARGIN:
        word = "FAST"
    elif low > 1 + MARGIN:
        word = "SLOW"
    elif low >= 1 - MARGIN and high <= 1 + MARGIN:
        word = "SAME"
    return Change(case, reference, ratio, low, high, word)


def _key(case: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(case[name] for name in _KEY)


def _title(case: Mapping[str, Any]) -> str:
    from .cases import Case

    return Case(*_key(case)).title
