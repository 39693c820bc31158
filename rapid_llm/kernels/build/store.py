"""Where artifacts lie: the package's own, the user's cache, and a private temporary directory, asked in this order.

An artifact is a folder `<root>/<path>/<name>-<key>/` with the built file, `artifact.json` (its digest, its headers, all
that went into its key) and `build.log`. The folder comes into being by one rename, so whoever finds it finds all of it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .digests import content_digest, user_root
from .keys import Headers
from .unit import PLAIN, Unit

RECORD: Final = "artifact.json"
LOG: Final = "build.log"
FORMAT: Final = 1
STAGING, LOCKS, LOGS, DIGESTS = "staging", "locks", "logs", "digests"
FOLDERS: Final = (STAGING, LOCKS, LOGS, DIGESTS)
"""Folders of a root that hold no artifacts."""

_TOUCH_S: Final = 3600
"""The time of last use is kept to the hour: a look-up must not write each time."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One root. Only writable layers are built into."""

    name: str
    root: Path
    writable: bool


@dataclass(frozen=True, slots=True)
class Record:
    """What `artifact.json` says of an artifact."""

    folder: Path
    layer: str
    path: str
    name: str
    key: str
    output: str
    digest: str
    size: int
    arch: str
    seconds: float
    created: float
    headers: Headers
    sources: tuple[tuple[str, str], ...]
    details: dict[str, Any]

    @property
    def file(self) -> Path:
        return self.folder / self.output

    def fault(self) -> str:
        """Why the built file is not the one that was built, or ''."""
        try:
            if self.file.is_symlink() or content_digest(self.file) != self.digest:
                return "its content differs from what was built"
        except OSError as error:
            return f"it cannot be read: {error}"
        return ""


def layers() -> tuple[Layer, ...]:
    """The roots in the order in which they are asked. A process without a home, or without a temporary directory (a
    read-only container, a full disk), has one less."""
    user, temporary = user_root(), _temporary_root()
    return (
        Layer("package", Path(__file__).parents[1] / "prebuilt", writable=False),
        *([Layer("user", user, writable=True)] if user is not None else []),
        *([Layer("temporary", temporary, writable=True)] if temporary is not None else []),
    )


def _temporary_root() -> Path | None:
    try:
        return Path(tempfile.gettempdir()) / f"rapid_llm-{os.getuid()}" / "builds"
    except FileNotFoundError:  # none that can be written
        return None


def open_layer(layer: Layer) -> None:
    """Make a writable layer's folders; raises OSError with the reason if nothing can be built there."""
    if layer.name == "temporary":
        _make_private(layer.root.parent)
    for name in FOLDERS[:3]:
        (layer.root / name).mkdir(parents=True, exist_ok=True)


def readable(layer: Layer) -> bool:
    """Whether what lies there may be loaded: a temporary directory of somebody else's may not."""
    return (
        os.access(layer.root, os.R_OK | os.X_OK)
        and os.path.isdir(layer.root)
        and (layer.name != "temporary" or not _not_private(layer.root.parent))
    )


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        reason = _not_private(folder)
        if reason:
            raise PermissionError(reason) from None


def _not_private(folder: Path) -> str:
    """Why code must not be loaded from a folder below the shared temporary directory, or ''."""
    state = os.lstat(folder)
    if not stat.S_ISDIR(state.st_mode):
        return f"{folder} is not a directory (a link, or a file)"
    if state.st_uid != os.getuid():
        return f"{folder} belongs to user {state.st_uid}, not to {os.getuid()}"
    if state.st_mode & 0o077:
        return f"{folder} is open to other users (mode {state.st_mode & 0o777:o}); run: chmod 700 {folder}"
    return ""


def candidates(layer: Layer, unit: Unit, base: str) -> Iterator[Record]:
    """Artifacts of this unit whose key has this base; those whose record is damaged are left out."""
    if not readable(layer):
        return
    prefix = f"{unit.name}-{base}-"
    try:
        names = sorted(name for name in os.listdir(layer.root / unit.path) if name.startswith(prefix))
    except OSError:  # nothing of this path was built there yet
        return
    for name in names:
        record = read(layer.root / unit.path / name, layer.name)
        if record is not None:
            yield record


def read(folder: Path, layer: str) -> Record | None:
    """The record of one artifact's folder, or None if there is none that can be read."""
    try:
        kept = json.loads((folder / RECORD).read_bytes())
        seconds, created = float(kept["seconds"]), float(kept["created"])
        if kept["format"] != FORMAT or not PLAIN.fullmatch(kept["output"]) or not math.isfinite(seconds + created):
            return None
        return Record(
            folder=folder,
            layer=layer,
            path=str(kept["path"]),
            name=str(kept["name"]),
            key=str(kept["key"]),
            output=str(kept["output"]),
            digest=str(kept["digest"]),
            size=int(kept["size"]),
            arch=str(kept["arch"]),
            seconds=seconds,
            created=created,
            headers=Headers(tuple((str(n), str(d)) for n, d in kept["headers"])),
            sources=tuple((str(n), str(d)) for n, d in kept["sources"]),
            details=dict(kept["details"]),
        )
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):  # absent, cut short, not ours
        return None


def write(staging: Path, record: dict[str, Any]) -> None:
    """Put the record beside the built file, before both are published."""
    (staging / RECORD).write_text(json.dumps({"format": FORMAT, **record}, indent=1))


def touch(record: Record) -> None:
    """Note that the artifact was used, for gc; a store that cannot be written goes without."""
    file = record.folder / RECORD
    try:
        if time.time() - file.stat().st_mtime > _TOUCH_S:
            os.utime(file)
    except OSError:
        return


def stage(root: Path, stem: str) -> Path:
    """A folder of one's own to build in, on the file system of the artifacts.

    Its permissions are those of any new folder, not mkdtemp's: what an image's builder (root, say) made must be of use
    to whom the image runs as, and several users may share a cache."""
    folder = root / STAGING / f"{stem}.{secrets.token_hex(8)}"
    folder.mkdir()
    return folder


def sweep(root: Path, stem: str) -> None:
    """Remove what killed builders of this key left; the caller holds the key's lock, so none of it is in use."""
    for left in (root / STAGING).glob(f"{stem}.*"):
        shutil.rmtree(left, ignore_errors=True)


def discard(folder: Path, root: Path) -> None:
    """Take an artifact away by one rename, then delete it: no reader sees half of it. Raises OSError.

    A folder in the lower layer of an overlay (a container's image) cannot be renamed: it goes record first, so that no
    reader finds the rest."""
    away = stage(root, "removal")
    try:
        os.rename(folder, away / "artifact")
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        (folder / RECORD).unlink(missing_ok=True)
        shutil.rmtree(folder)
    finally:
        shutil.rmtree(away, ignore_errors=True)
