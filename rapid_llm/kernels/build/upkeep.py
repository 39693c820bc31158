"""Looking after the store: what is in it, whether it is whole, and taking away what is no longer wanted."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from . import keys, locks, store
from .digests import content_digest

FOLDER: Final = re.compile(r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.+-]*)-(?P<key>[0-9a-f]{24}-[0-9a-f]{16})")
"""An artifact's folder: its name and its key."""

_DAY_S: Final = 86400.0
_CRUMB_S: Final = 3600.0
"""Left-overs that no lock speaks for are taken for abandoned at this age."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Something that gc took away, or would: what it was, where, its bytes, and why."""

    kind: str
    path: Path
    size: int
    reason: str


def artifacts(layers: Sequence[store.Layer] | None = None) -> list[store.Record]:
    """Every artifact of every layer that may be read, by path, name and age."""
    found = [record for layer, folder in _folders(layers) if (record := store.read(folder, layer.name)) is not None]
    return sorted(found, key=lambda r: (r.path, r.name, r.arch, -r.created))


def states(records: Sequence[store.Record]) -> dict[Path, str]:
    """Of each artifact's folder: `in use`, `stale` (its source changed, or a newer one took its place), or `unknown`,
    where its source lies outside this package."""
    found: dict[Path, str] = {}
    newest: set[str] = set()
    for record in sorted(records, key=lambda r: -r.created):
        place = repr((record.layer, record.path, record.name, record.arch, record.details))
        superseded = place in newest
        newest.add(place)
        if superseded or not all(_unchanged(name, digest) for name, digest in record.sources):
            found[record.folder] = "stale"
        else:
            found[record.folder] = "in use" if record.sources else "unknown"
    return found


def last_used(record: store.Record) -> float:
    """When the artifact was last taken, to the hour, in seconds since 1970."""
    try:
        return (record.folder / store.RECORD).stat().st_mtime
    except OSError:  # taken away meanwhile
        return record.created


def faults() -> list[tuple[Path, str]]:
    """Artifacts that are not what was built: their folder and what is wrong."""
    found = []
    for layer, folder in _folders(None):
        record = store.read(folder, layer.name)
        fault = f"it has no {store.RECORD} that can be read" if record is None else record.fault()
        if fault:
            found.append((folder, fault))
    return found


def gc(*, older_than_days: float | None = None, newest_only: bool = False, dry_run: bool = False) -> list[Removed]:
    """Take away left-overs of killed builds and damaged artifacts; with options also good artifacts.

    older_than_days: those not used for so long, with logs and locks of that age. newest_only: all but the newest of
    each path, name and architecture. Only writable layers are touched. Raises OSError.
    """
    removed: list[Removed] = []
    for layer in store.layers():
        if not layer.writable or not store.readable(layer):
            continue
        store.open_layer(layer)
        removed += _left_overs(layer, dry_run)
        seen: set[tuple[str, str, str]] = set()
        for record in artifacts([layer]):  # newest first within a name
            place = (record.path, record.name, record.arch)
            reason = _why_not(record, place in seen and newest_only, older_than_days)
            if reason:
                removed.append(Removed("artifact", record.folder, _size(record.folder), reason))
                if not dry_run:
                    _discard(record.folder, layer)
            else:
                seen.add(place)
        if older_than_days is not None:
            removed += _old_notes(layer, older_than_days, dry_run)
    return removed


def _why_not(record: store.Record, superseded: bool, older_than_days: float | None) -> str:
    fault = record.fault()
    if fault:
        return fault
    days = (time.time() - last_used(record)) / _DAY_S
    if older_than_days is not None and days > older_than_days:
        return f"not used for {days:.0f} days"
    return "there is a newer one" if superseded else ""


def _folders(layers: Sequence[store.Layer] | None) -> Iterator[tuple[store.Layer, Path]]:
    for layer in store.layers() if layers is None else layers:
        if not store.readable(layer):
            continue
        for group in sorted(layer.root.iterdir()):
            if group.name in store.FOLDERS or not group.is_dir() or not os.access(group, os.R_OK | os.X_OK):
                continue
            for folder in sorted(group.iterdir()):
                if FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
                    yield layer, folder


def _unchanged(name: str, digest: str) -> bool:
    try:
        return content_digest(keys.package_file(name)) == digest
    except OSError:
        return False


def _left_overs(layer: store.Layer, dry_run: bool) -> list[Removed]:
    """Staging folders without a living owner, and artifacts without a record."""
    found = []
    for folder in sorted((layer.root / store.STAGING).iterdir()):
        stem = folder.name.rpartition(".")[0]
        lock = locks.KeyLock(layer.root / store.LOCKS / f"{stem}.lock", f"gc of {stem}", 0.0)
        if not lock.path.exists():  # an import or a removal, which have no lock
            if _older(folder, time.time() - _CRUMB_S):
                found.append(_remove(folder, "left-over", f"left behind by a killed {stem}", dry_run))
        elif lock.try_now():
            try:
                if folder.exists():  # not one that its builder took away before its lock was free
                    found.append(_remove(folder, "left-over", "left behind by a killed build", dry_run))
            finally:
                lock.release()
    for _, folder in _folders([layer]):
        if store.read(folder, layer.name) is None:
            found.append(Removed("artifact", folder, _size(folder), f"it has no {store.RECORD} that can be read"))
            if not dry_run:
                _discard(folder, layer)
    return found


def _discard(folder: Path, layer: store.Layer) -> None:
    with contextlib.suppress(FileNotFoundError):  # a builder that found it damaged was quicker
        store.discard(folder, layer.root)


def _old_notes(layer: store.Layer, older_than_days: float, dry_run: bool) -> list[Removed]:
    """Logs of failed builds and lock files of that age; a lock that is held stays."""
    found = []
    limit = time.time() - older_than_days * _DAY_S
    for file in sorted((layer.root / store.LOGS).iterdir()):
        if _older(file, limit):
            found.append(_remove(file, "log", "old", dry_run))
    for file in sorted((layer.root / store.LOCKS).iterdir()):
        lock = locks.KeyLock(file, "gc", 0.0)
        if _older(file, limit) and lock.try_now():
            try:
                found.append(_remove(file, "lock", "old", dry_run))
            finally:
                lock.release()
    return found


def _remove(path: Path, kind: str, reason: str, dry_run: bool) -> Removed:
    removed = Removed(kind, path, _size(path), reason)
    if not dry_run:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # a compiler that outlived its builder may still write there
        else:
            path.unlink(missing_ok=True)
    return removed


def _older(path: Path, limit: float) -> bool:
    """Whether it is there and was last changed before `limit`: builders and other collectors are at work meanwhile."""
    try:
        return path.stat().st_mtime < limit
    except FileNotFoundError:
        return False


def _size(path: Path) -> int:
    if not path.is_dir():
        return _length(path)
    return sum(_length(Path(at, name)) for at, _, names in os.walk(path) for name in names)


def _length(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:  # taken away meanwhile
        return 0
