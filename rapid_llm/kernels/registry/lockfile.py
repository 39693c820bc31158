"""Decisions pinned in a file: exported from one process, replayed in others, and compared.

An entry is a call's facts, the row that it ran, and the digest of that row's source. While a file is in use, a call
whose facts it holds runs just that row; where that cannot be, because the row is gone, is another one, or cannot run
the call on this machine, that is an error that names it, never another choice. A call that the file does not hold is
dispatched as usual.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from . import records, registry
from .errors import LockError, UnknownOpError, UnknownRowError
from .facts import Facts
from .overrides import Forced

if TYPE_CHECKING:
    from pathlib import Path

    from .dispatcher import Decision

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One decision. kind: the class of the device. digest: None for a row whose source cannot be read."""

    facts: Facts
    kind: str | None
    row: str
    digest: str | None

    @property
    def title(self) -> str:
        f = self.facts
        sizes = ", ".join(f"{name}={size}" for name, size in sorted(f.dims.items()))
        flags = [name for name in ("prepack", "capturing", "batch_invariant") if getattr(f, name)]
        words = (f.op, f.device, f.dtype, f.scheme, sizes, *flags, *sorted(f.allow))
        return " ".join(word for word in words if word)

    def as_json(self) -> dict[str, Any]:
        return {"key": self.facts.as_json(), "kind": self.kind, "row": self.row, "digest": self.digest}


@dataclass(frozen=True, slots=True)
class Lock:
    """The entries of a file, by `key`."""

    name: str
    entries: Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class Difference:
    """One call that two locks disagree on. here, there: row and digest, None where the lock lacks the call."""

    title: str
    here: tuple[str, str | None] | None
    there: tuple[str, str | None] | None

    def __str__(self) -> str:
        def told(side: tuple[str, str | None] | None) -> str:
            return "not there" if side is None else side[0]

        if self.here and self.there and self.here[0] == self.there[0]:
            return f"{self.title}: {self.here[0]}, of other source"
        return f"{self.title}: {told(self.here)} -> {told(self.there)}"


_active: list[Lock | None] = [None]
_followed: list[Path | None] = [None]


def key(facts: Facts) -> str:
    """What two calls have in common that are one decision, on whichever GPU of a machine."""
    return json.dumps(facts.as_json(), sort_keys=True)


def export(decisions: Iterable[Decision], name: str = "this process") -> Lock:
    """A lock of decisions that were made; those for a forced row are nobody's choice, and left out."""
    found: dict[str, Entry] = {}
    for decision in decisions:
        facts = decision.facts
        if decision.forced is None or decision.forced.what == decision.row.name == _pinned_row(facts):
            kind = records.device_class(facts.device, facts.index)
            found[key(facts)] = Entry(facts, kind, decision.row.name, digest_of(decision.row.name))
    return Lock(name, found)


def _pinned_row(facts: Facts) -> str | None:
    lock = _active[0]
    entry = None if lock is None else lock.entries.get(key(facts))
    return None if entry is None else entry.row


def digest_of(row: str) -> str | None:
    """The digest of a row's source as it is now."""
    spec = registry.get_row(row)
    from . import digest  # here, because few processes ever need it

    source = digest.source_of(spec, registry.get_op(spec.op))
    return None if source is None else source.digest + source.extension


def write(lock: Lock, path: Path) -> None:
    """Write a lock, one entry a line, sorted, so that a version control shows what changed."""
    lines = [f"  {json.dumps(lock.entries[k].as_json())}" for k in sorted(lock.entries)]
    text = f'{{"format": {FORMAT}, "decisions": [\n' + ",\n".join(lines) + "\n]}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_text(text)
    os.replace(staged, path)


def load(path: Path) -> Lock:
    """The lock in a file; raises `LockError` if it is none."""
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise ValueError(f"it is of format {data['format']}, and this version reads {FORMAT}")
        entries = [_entry(fields) for fields in data["decisions"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LockError(f"{path} is not a lockfile of decisions: {type(error).__name__}: {error}") from error
    return Lock(str(path), {key(entry.facts): entry for entry in entries})


def _entry(fields: Mapping[str, Any]) -> Entry:
    given: dict[str, Any] = dict(fields["key"])
    given |= {name: frozenset(given[name]) for name in ("layout", "allow")}
    return Entry(Facts(**given), fields["kind"], fields["row"], fields["digest"])


def use(lock: Lock | None) -> None:
    """Dispatch by `lock` from now on, or freely again (None)."""
    from . import dispatcher

    _active[0] = lock
    dispatcher.forget(None)


@contextmanager
def using(lock: Lock) -> Iterator[None]:
    """Within the block, in every thread, dispatch by `lock`."""
    previous = _active[0]
    use(lock)
    try:
        yield
    finally:
        use(previous)


def follow(path: Path | None) -> None:
    """Use the file that RAPID_LLM_LOCK names; None: stop using the one that it named before. Changes what `pin` answers
    and leaves it to the caller to forget decisions."""
    if path != _followed[0]:
        _active[0] = None if path is None else load(path)
        _followed[0] = path


def pin(facts: Facts) -> Forced | None:
    """The row that the lock in use names for a call, None where it names none; raises `LockError` where that row is not
    what it was."""
    lock = _active[0]
    entry = None if lock is None else lock.entries.get(key(facts))
    if lock is None or entry is None:
        return None
    wrong = changed(entry, facts)
    if wrong:
        raise LockError(
            f"{entry.title}: {lock.name} pins {entry.row}, {wrong}; export the decisions anew, or do without the lock"
        )
    return Forced(entry.row, lock.name)


def changed(entry: Entry, facts: Facts | None = None) -> str:
    """What of an entry no longer holds here, or ""."""
    known = entry.facts if facts is None else facts
    kind = records.device_class(known.device, known.index)
    if kind != entry.kind:
        return f"decided on {entry.kind}, and this is {kind or 'a machine without such a device'}"
    try:
        spec = registry.get_row(entry.row)
        registry.get_op(entry.facts.op)
    except (UnknownRowError, UnknownOpError):
        return "which is not registered here"
    if spec.op != entry.facts.op:
        return f"which is a row of {spec.op}"
    now = digest_of(entry.row)
    if now != entry.digest:
        return f"whose source has changed (digest {_short(entry.digest)}, now {_short(now)})"
    return ""


def _short(text: str | None) -> str:
    return "unknown" if text is None else text[:12]


def replay(lock: Lock, settle: Callable[[Facts], Decision]) -> dict[str, str]:
    """Every entry that does not hold on this machine, title -> why. settle: decides a call with `lock` in use."""
    from .errors import KernelError

    wrong: dict[str, str] = {}
    with using(lock):
        for entry in lock.entries.values():
            try:
                settle(entry.facts)
            except KernelError as error:
                wrong[entry.title] = str(error)
    return wrong


def differences(one: Lock, other: Lock) -> list[Difference]:
    """The calls that only one of two locks holds, or for which they name another row or source."""

    def side(lock: Lock, k: str) -> tuple[str, str | None] | None:
        entry = lock.entries.get(k)
        return None if entry is None else (entry.row, entry.digest)

    keys = sorted({*one.entries, *other.entries})
    titles = {k: (one.entries.get(k) or other.entries[k]).title for k in keys}
    pairs = [Difference(titles[k], side(one, k), side(other, k)) for k in keys]
    return [pair for pair in pairs if pair.here != pair.there]


def conflicts(locks: Sequence[Lock]) -> list[str]:
    """Calls for which two locks name another row or source, each with who names what. Calls that only one lock holds
    are no conflict: ranks of a model that is split make different calls."""
    found = []
    for k in sorted({k for lock in locks for k in lock.entries}):
        named = [(lock.name, lock.entries[k]) for lock in locks if k in lock.entries]
        sides: dict[tuple[str, str | None], list[str]] = {}
        for name, entry in named:
            sides.setdefault((entry.row, entry.digest), []).append(name)
        if len(sides) > 1:
            told = [f"{row} (source {_short(source)}) on {', '.join(who)}" for (row, source), who in sides.items()]
            found.append(f"{named[0][1].title}: {'; '.join(told)}")
    return found


def agree(lock: Lock, gather: Callable[[Lock], Sequence[Lock]]) -> None:
    """Raise `LockError` on every rank unless all ranks decided alike for the calls that they share.

    gather: one collective call that gives each rank every rank's lock, such as one of `all_gather_object`. For ranks
    whose records may differ, before the first collective of a model: rows of other numerics, or of other needs, would
    part them later, where it shows as a hang.
    """
    wrong = conflicts([replace(other, name=f"rank {rank}") for rank, other in enumerate(gather(lock))])
    if wrong:
        lines = "\n".join(f"  {line}" for line in wrong)
        cure = "give them the same records or one RAPID_LLM_LOCK"
        raise LockError(f"ranks choose differently for {len(wrong)} calls; {cure}:\n{lines}")
