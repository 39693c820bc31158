"""Rows from other packages, through the entry-point group `rapid_llm.kernels`; a broken plugin harms nothing but
itself.

An entry point names one of: a function of no argument or of one (the API version below) that calls `register` or
returns specs; an iterable of specs; or a module that registers when imported. A plugin states the API it was written
for as `RAPID_LLM_API` in its module; a newer one than ours is refused.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from . import probes, registry
from .errors import told
from .forking import Lock
from .spec import KernelSpec, OpSpec

if TYPE_CHECKING:
    from pathlib import Path

API_VERSION: Final = 1
GROUP: Final = "rapid_llm.kernels"

_log = logging.getLogger(__name__)
_lock: Final = Lock()
_state: Final[dict[str, bool]] = {"scanned": False}
_plugins: Final[list[Plugin]] = []


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point: its name, what it points to, the rows it brought, and the failure's text if it is dead."""

    name: str
    value: str
    rows: tuple[str, ...]
    failure: str | None


def plugins() -> tuple[Plugin, ...]:
    """Every plugin found; scans on first demand."""
    scan()
    return tuple(_plugins)


def scan() -> None:
    """Find and load the plugins, once per process."""
    if _state["scanned"]:
        return
    with _lock:
        if _state["scanned"]:
            return
        _state["scanned"] = True  # first: a plugin that dispatches while loading must not scan again
        if _any_installed():
            _plugins.extend(_load(name, value) for name, value in _entries() if not _known(name, value))


def rescan() -> None:
    """Look again, for a package installed while running; plugins already loaded stay."""
    with _lock:
        _plugins.extend(_load(name, value) for name, value in _entries() if not _known(name, value))
        _state["scanned"] = True


def _known(name: str, value: str) -> bool:
    return any((p.name, p.value) == (name, value) for p in _plugins)


def _entries() -> list[tuple[str, str]]:
    """(name, value) of every entry point, each once, of the first distribution of a name, as imports would have it.

    Asked of each distribution by itself: one whose files are damaged hides no other's plugins.
    """
    from importlib import metadata  # 34 ms, so only where some package names the group

    distributions = list(metadata.distributions(path=_folders()))
    if not any(_names_group(distribution) for distribution in distributions):
        return []  # nearly everywhere so, and reading each distribution's name would take as long as all of dispatch
    found: dict[tuple[str, str], None] = {}
    seen: set[str] = set()
    for distribution in distributions:
        try:
            name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
            entries = [] if name and name in seen else distribution.entry_points
            found.update({(e.name, e.value): None for e in entries if e.group == GROUP})
            seen.add(name)
        except Exception as error:  # of whatever is wrong with a foreign package's files
            _log.info("no kernel plugins are looked for in a damaged installation: %s", error)
    return list(found)


def _names_group(distribution: Any) -> bool:
    """Whether a distribution's entry points may be of the group; one that cannot be read is looked at with care."""
    try:
        return f"[{GROUP}]" in (distribution.read_text("entry_points.txt") or "")
    except Exception:
        return True


def _folders() -> list[str]:
    """The import path without entries that are no strings, over which imports pass too."""
    return [folder for folder in sys.path if isinstance(folder, str)]


def _any_installed() -> bool:
    """Whether any distribution's entry points name the group, by reading the small files alone."""
    if "importlib.metadata" in sys.modules:
        return True
    from pathlib import Path

    section = f"[{GROUP}]"
    for folder in _folders():
        root = Path(folder or ".")
        try:
            files = [*root.glob("*.dist-info/entry_points.txt"), *root.glob("*.egg-info/entry_points.txt")]
        except OSError:  # an unreadable or vanished path entry has no plugins to offer
            continue
        if any(section in _text(file) for file in files):
            return True
    return False


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:  # one that cannot be read hides no other
        return ""


def _load(name: str, value: str) -> Plugin:
    module_name, _, attr = value.partition("[")[0].strip().partition(":")  # [extras] are no part of the name
    before = _row_names()
    try:
        probe = probes.check_module(module_name)
        if not probe.ok:
            raise ImportError(probe.text)
        module = importlib.import_module(module_name)
        wanted = getattr(module, "RAPID_LLM_API", API_VERSION)
        if wanted > API_VERSION:
            raise ImportError(f"written for plugin API {wanted}; this rapid_llm has {API_VERSION}: upgrade rapid_llm")
        loaded: Any = module
        for part in attr.strip().split(".") if attr else ():
            loaded = getattr(loaded, part)
        _accept(loaded)
    except BaseException as error:  # whatever a plugin raises is its own failure, never ours
        if isinstance(error, KeyboardInterrupt):
            raise
        text = traceback.format_exc(limit=-8)  # as far as the line that registers
        _log.warning("kernel plugin %s (%s) is out: %s", name, value, told(error))
        return Plugin(name, value, tuple(sorted(_row_names() - before)), text)
    return Plugin(name, value, tuple(sorted(_row_names() - before)), None)


def _accept(loaded: Any) -> None:
    if callable(loaded):
        import inspect

        loaded = loaded(API_VERSION) if inspect.signature(loaded).parameters else loaded()
    if isinstance(loaded, (OpSpec, KernelSpec)):
        registry.register(loaded)
    elif isinstance(loaded, Iterable) and not isinstance(loaded, (str, bytes)):
        specs = tuple(loaded)
        if specs:
            registry.register(*specs)


def _row_names() -> set[str]:
    return {row.name for op in registry.ops() for row in registry.rows(op.id)}
