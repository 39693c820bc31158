"""Carrying artifacts from one machine to another in a plain tar file.

Import takes nothing on trust that it can check: only regular files of the expected names, whole by their digests, each
in the folder that its record names. It cannot check who built them: they are programs, so import only what you trust.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from . import locks, store
from .errors import BuildError
from .unit import PLAIN
from .upkeep import FOLDER

_RECORD_LIMIT: Final = 4 << 20
_LOCK_S: Final = 60.0


class ArchiveError(BuildError):
    """An archive that cannot be written, or that holds what no export writes; the text names the member."""


def export(records: Sequence[store.Record], file: Path) -> None:
    """Write artifacts to `file`: the built file and its record, without logs, times, or this machine's paths."""
    for record in records:
        fault = record.fault()
        if fault:
            raise ArchiveError(f"{record.folder} is damaged: {fault}; run: rapid-llm cache gc")
    partial = file.with_name(f".{secrets.token_hex(8)}.tmp")  # not mkstemp's, which nobody else may read
    try:
        with open(partial, "xb") as raw, tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for record in sorted(records, key=lambda r: r.folder):
                for name in (record.output, store.RECORD):
                    data = (record.folder / name).read_bytes()
                    member = tarfile.TarInfo(f"{record.path}/{record.folder.name}/{name}")
                    member.size, member.mode = len(data), 0o644
                    tar.addfile(member, io.BytesIO(data))
        os.replace(partial, file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def load(file: Path) -> tuple[list[str], list[str]]:
    """Bring an archive's artifacts into the first layer that can be written: (those added, those already there).

    All are checked before the first is added. Raises `ArchiveError` or OSError.
    """
    layer = _writable()
    staging = store.stage(layer.root, "import")
    try:
        groups = _unpack(file, staging)
        records = [_checked(folder, path) for path, folder in groups]
        added: list[str] = []
        known: list[str] = []
        for record in records:
            key = f"{record.path}/{record.folder.name}"
            (added if _publish(layer, record) else known).append(key)
        return added, known
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _writable() -> store.Layer:
    reasons = []
    for layer in store.layers():
        if layer.writable:
            try:
                store.open_layer(layer)
                return layer
            except OSError as error:
                reasons.append(f"{layer.root}: {error}")
    raise ArchiveError(f"no directory to import into: {'; '.join(reasons)}")


def _unpack(file: Path, staging: Path) -> list[tuple[str, Path]]:
    """Write the members below `staging`; every name and kind is checked, nothing else is ever created."""
    groups: dict[tuple[str, str], Path] = {}
    try:
        with tarfile.open(file, mode="r:") as tar:
            for member in tar:
                path, folder, name = _parts(member)
                data = tar.extractfile(member)
                if data is None:
                    raise ArchiveError(f"{file}: {member.name!r} has no content")
                target = groups.setdefault((path, folder), staging / path / folder)
                target.mkdir(parents=True, exist_ok=True)
                with open(target / name, "xb") as out:
                    shutil.copyfileobj(data, out)
    except FileExistsError as error:
        raise ArchiveError(f"{file}: a member is there twice: {error.filename}") from error
    except (tarfile.TarError, ValueError, ArithmeticError) as error:  # the latter of numbers in its extended headers
        raise ArchiveError(f"{file} is not a tar file that `rapid-llm cache export` wrote: {error}") from error
    if not groups:
        raise ArchiveError(f"{file} holds no artifacts")
    return [(path, folder) for (path, _), folder in sorted(groups.items())]


def _parts(member: tarfile.TarInfo) -> tuple[str, str, str]:
    """The three parts of a member's name, or `ArchiveError`."""
    refused = f"{member.name!r} is refused:"
    if not member.isreg() or member.issparse():
        raise ArchiveError(f"{refused} only regular files are imported, no links, folders or devices")
    parts = member.name.split("/")
    if len(parts) != 3 or any(PLAIN.fullmatch(part) is None for part in parts):
        raise ArchiveError(f"{refused} names have the form PATH/NAME-KEY/FILE")
    if FOLDER.fullmatch(parts[1]) is None or parts[0] in store.FOLDERS:
        raise ArchiveError(f"{refused} {PurePosixPath(*parts[:2])} is no artifact's folder")
    if parts[2] == store.RECORD and member.size > _RECORD_LIMIT:
        raise ArchiveError(f"{refused} a record of {member.size} bytes")
    return parts[0], parts[1], parts[2]


def _checked(folder: Path, path: str) -> store.Record:
    """The record of an unpacked artifact that is whole and where its record says."""
    what = f"{path}/{folder.name}"
    record = store.read(folder, "archive")
    if record is None:
        raise ArchiveError(f"{what}: its {store.RECORD} is missing or damaged")
    if (record.path, f"{record.name}-{record.key}") != (path, folder.name):
        raise ArchiveError(f"{what}: its record is that of {record.path}/{record.name}-{record.key}")
    extra = {entry.name for entry in folder.iterdir()} - {record.output, store.RECORD}
    if extra:
        raise ArchiveError(f"{what}: foreign file {sorted(extra)[0]!r}")
    fault = record.fault()
    if fault:
        raise ArchiveError(f"{what}: {fault}")
    return record


def _publish(layer: store.Layer, record: store.Record) -> bool:
    """Rename into place; False if a whole one is there."""
    final = layer.root / record.path / record.folder.name
    final.parent.mkdir(parents=True, exist_ok=True)
    stem = f"{record.path}-{record.name}-{record.key.partition('-')[0]}"
    lock = locks.KeyLock(layer.root / store.LOCKS / f"{stem}.lock", f"import of {record.path}/{record.name}", _LOCK_S)
    with lock:
        if final.exists():
            there = store.read(final, layer.name)
            if there is not None and not there.fault():
                return False
            store.discard(final, layer.root)
        os.rename(record.folder, final)
    return True
