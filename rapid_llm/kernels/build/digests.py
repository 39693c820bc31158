"""Content digests of files: small ones always read, large ones (libraries that are linked) remembered on disk."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any, Final

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
    remember(text_digest(name, length=24), {"stamp": stamp, "digest": digest})
    return digest


def user_root() -> Path | None:
    """The user's own layer of the store; None for a user without a home."""
    try:
        return settings.cache_dir() / "builds"
    except (RuntimeError, settings.SettingError):  # of Path.home(), or of a variable that `doctor` reports
        return None


def recall(name: str) -> Any:
    """The note of this name, or None; who reads it must expect any JSON."""
    root = user_root()
    try:
        return json.loads((root / "digests" / f"{name}.json").read_bytes()) if root is not None else None
    except (OSError, ValueError, RecursionError):  # absent or damaged: found out anew
        return None


def remember(name: str, value: Any) -> None:
    """Keep a note that only saves time."""
    root = user_root()
    if root is not None:
        write_quietly(root / "digests" / f"{name}.json", json.dumps(value))


def _recall(name: str) -> tuple[list[int], str] | None:
    try:
        kept = recall(text_digest(name, length=24))
        return [int(n) for n in kept["stamp"]], str(kept["digest"])
    except (ValueError, KeyError, TypeError):  # absent or damaged: the file is read
        return None


def write_quietly(path: Path, text: str) -> None:
    """Keep a text that only saves time: published by one rename; a place that cannot be written is no error."""
    partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        return
