"""First use on a machine: a row that was proven elsewhere answers a few small calls before it answers the first real
one.

Only a row whose evidence ships with the package is asked; one that was proven on this machine is not. The answers are
compared with the op's float64 oracle, once for each machine and source of the row, and what came of it is remembered
in the user's cache. A row that is wrong is quarantined, and the call that showed it is kept in a file that replays. The
comparison is the verifier's, which this package reaches by name alone.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final

from rapid_llm import settings

from . import evidence, probes, records
from .capture import capturing
from .errors import NotReadyError
from .facts import Facts
from .forking import Lock
from .spec import KernelSpec

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)

TRY: Final = "rapid_llm.verify.replay:first_use"
"""(row name, device, dtype, scheme, folder for cases) -> what is wrong, or ""."""

_lock: Final = Lock()
_passed: Final[set[tuple[str, ...]]] = set()


def sound(row: KernelSpec, facts: Facts) -> bool:
    """Whether `row` may answer a call like `facts`; its first small calls are made now, if they are due.

    Raises `NotReadyError` while a CUDA graph is captured, which those calls would become part of.
    """
    known = evidence.of(row, facts)
    if row.is_native or known.layer != records.SHIPPED or known.state != "record" or facts.dtype is None:
        return True
    kind = records.device_class(facts.device, facts.index)
    kept = records.table(records.SHIPPED, str(kind)).get(row.name)
    if kind is None or kept is None:
        return True
    what = (row.name, records.proof_key(facts.dtype, facts.scheme))
    key = (kind, *what, kept.source.digest)
    with _lock:
        if key in _passed:
            return True
        problem = _remembered(kind, what, kept.source.digest)
        if problem is None:
            if capturing():
                raise NotReadyError(
                    f"{row.name}: its first use on this machine is checked outside of a graph's capture"
                )
            problem = _try(row, facts)
            _remember(kind, what, kept.source.digest, problem)
        if not problem:
            _passed.add(key)
            return True
    evidence.quarantine(row.name, facts.device, f"its answers are wrong on this machine: {problem}")
    _log.warning("%s is quarantined: its first answers on this machine are wrong: %s", row.name, problem)
    return False


def _try(row: KernelSpec, facts: Facts) -> str:
    device = facts.device if facts.index is None else f"{facts.device}:{facts.index}"
    try:
        problem: str = probes.load(TRY)(
            row.name, device, facts.dtype, facts.scheme, settings.cache_dir() / "quarantine"
        )
    except Exception as error:  # a row that raises is as bad as one that is wrong
        problem = f"{type(error).__name__}: {error}"
    return problem


def _file(kind: str) -> Path:
    """What this machine remembers: the cache may be shared by several."""
    host = records.file_name(os.uname().nodename or "here").removesuffix(".json")
    return settings.cache_dir() / "canary" / f"{host}-{records.file_name(kind)}"


def _remembered(kind: str, what: tuple[str, str], digest: str) -> str | None:
    """What came of the row's first calls here: "" if they were right; None if they are not made yet."""
    entry = _read(_file(kind)).get(" ".join(what))
    return entry["problem"] if isinstance(entry, dict) and entry.get("digest") == digest else None


def _read(path: Path) -> dict[str, Any]:
    import json

    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):  # lost or damaged: the calls are made again
        return {}
    return data if isinstance(data, dict) else {}


def _remember(kind: str, what: tuple[str, str], digest: str, problem: str) -> None:
    import json

    path = _file(kind)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {**_read(path), " ".join(what): {"digest": digest, "problem": problem}}
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        staged.write_text(json.dumps(data, indent=1))
        os.replace(staged, path)
    except OSError as error:  # a cache that cannot be written costs the same calls in the next process
        _log.info("what came of the first use of %s cannot be kept in %s: %s", what[0], path, error)
