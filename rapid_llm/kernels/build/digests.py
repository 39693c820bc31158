"""Content digests of files: small ones always read, large ones (libraries that are linked) remembered on disk."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Final

from rapid_llm import settings

LARGE: Final = 1 << 20
"""From this size on, a file with the same inode, size and modification time is not read again."""

_memo: Final[dict[str, tuple[list[int], str]]] = {}


def text_digest(*parts: str, length: int = 64) -> str:
    """The digest of several texts; the same texts split otherwise give another one."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape")
        whole.update(f"{len(data)}:".encode())
        whole.update(data)
    return whole.hexdigest()[:length]


def content_digest(path: Path) -> str:
    """sha256 of what is in the file now."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digest(path: Path) -> str:
    """The same, but a large file that looks unchanged is not read again."""
    state = os.stat(path)
    if state.st_size < LARGE:
        return content_digest(path)
    stamp = [state.st_ino, state.st_size, state.st_mtime_ns]
    name = os.path.realpath(path)
    known = _memo.get(name) or _recall(name)
    if known is not None and known[0] == stamp:
        _memo[name] = known
        return known[1]
    digest = content_digest(path)
    _memo[name] = (stamp, digest)
    _remember(name, stamp, digest)
    return digest


def _file(name: str) -> Path:
    return settings.cache_dir() / "builds" / "digests" / f"{text_digest(name, length=24)}.json"


def _recall(name: str) -> tuple[list[int], str] | None:
    try:
        kept = json.loads(_file(name).read_text())
        return [int(n) for n in kept["stamp"]], str(kept["digest"])
    except (OSError, ValueError, KeyError, TypeError):  # absent or damaged: the file is read
        return None


def _remember(name: str, stamp: list[int], digest: str) -> None:
    write_quietly(_file(name), json.dumps({"stamp": stamp, "digest": digest}))


def write_quietly(path: Path, text: str) -> None:
    """Keep a text that only saves time: published by one rename; a place that cannot be written is no error."""
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        return
