"""Tuned tiles on disk: beside the measured times, one JSON file for each class of devices, the user's own first.

An entry holds for one question to `tile_policy`: the name, and exactly these dimensions. It was made by `rapid-llm
kernels tune`, which found it faster than the heuristic beyond noise and proved the row with it. It ends with the source
of that row: whoever edits the kernel tunes it anew.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from . import records, timing_records
from .forking import Lock
from .records import SHIPPED, USER, Source

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)

FORMAT: Final = 1
FOLDER: Final = "tiles"

_lock: Final = Lock()
_tables: Final[dict[tuple[str, str], Table]] = {}


@dataclass(frozen=True, slots=True)
class Tuned:
    """tiles: the name that the heuristic is registered under. row: that was timed and proven with `meta`. was: what the
    heuristic says. ratio, low, high: time with `meta` over time without, and its interval; us: time with it."""

    tiles: str
    row: str
    dims: Mapping[str, int]
    meta: Mapping[str, int]
    was: Mapping[str, int]
    us: float
    ratio: float
    low: float
    high: float
    date: str = ""
    torch: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        return _key(self.tiles, self.dims)


@dataclass(frozen=True, slots=True)
class Table:
    """A file's content: entries by name and dimensions, and the sources of their rows."""

    sources: Mapping[str, Source] = field(default_factory=dict)
    entries: Mapping[tuple[object, ...], Tuned] = field(default_factory=dict)


def _key(tiles: str, dims: Mapping[str, int]) -> tuple[object, ...]:
    return (tiles, *sorted(dims.items()))


def find(tiles: str, dims: Mapping[str, int], device: str, index: int | None = None) -> Tuned | None:
    """The entry for these dimensions on a device, if its row's source is what it was."""
    kind = timing_records.device_class(device, index)
    for layer in () if kind is None else (USER, SHIPPED):
        known = table(layer, str(kind))
        entry = known.entries.get(_key(tiles, dims))
        if entry is not None and timing_records.holds(entry.row, layer, known.sources):
            return entry
    return None


def folder(layer: str) -> Path:
    """Where a layer's files lie; nothing is created."""
    return records.folder(layer) / FOLDER


def path_of(layer: str, kind: str) -> Path:
    """The file of a layer for a device class."""
    return folder(layer) / records.file_name(kind)


def table(layer: str, kind: str) -> Table:
    """The entries of a layer for a device class; read once a process."""
    path = path_of(layer, kind)
    key = (str(path), kind)
    with _lock:
        if key not in _tables:
            _tables[key] = load(path, kind)
        return _tables[key]


def forget() -> None:
    """Read files and sources again at the next need."""
    with _lock:
        _tables.clear()
    timing_records.forget()


def write(path: Path, kind: str, new: Sequence[Tuned], sources: Mapping[str, Source]) -> None:
    """Merge entries into the file at `path`; those of a row's older source are dropped."""
    import json

    with _lock:
        old = load(path, kind)
        moved = {name for name, source in sources.items() if name in old.sources and old.sources[name] != source}
        entries = {key: e for key, e in old.entries.items() if e.row not in moved}
        entries |= {entry.key: entry for entry in new}
        known = {**old.sources, **sources}
        used = sorted({entry.row for entry in entries.values()})
        heads = [
            f"  {json.dumps(row)}: {json.dumps({k: v for k, v in asdict(known[row]).items() if v})}" for row in used
        ]
        lines = [f"  {json.dumps(_plain(entries[key]))}" for key in sorted(entries, key=str)]
        head, body = ",\n".join(heads), ",\n".join(lines)
        text = (
            f'{{"format": {FORMAT}, "device": {json.dumps(kind)}, "sources": {{\n{head}\n}}, "tiles": [\n{body}\n]}}\n'
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        staged.write_text(text)
        os.replace(staged, path)
        forget()


def _plain(entry: Tuned) -> dict[str, Any]:
    sizes = {name: dict(getattr(entry, name)) for name in ("dims", "meta", "was")}
    figures = {name: float(f"{getattr(entry, name):.5g}") for name in ("us", "ratio", "low", "high")}
    return {"tiles": entry.tiles, "row": entry.row, **sizes, **figures, "date": entry.date, "torch": entry.torch}


def load(path: Path, kind: str) -> Table:
    """The table in a file; an empty one where there is none, or none of this class."""
    import json

    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT or data["device"] != kind:
            raise ValueError(f"it is of format {data['format']} and of {data['device']!r}")
        entries = [Tuned(**fields) for fields in data["tiles"]]
        bad = [e for e in entries if not all(type(v) is int and v > 0 for v in e.meta.values()) or not e.meta]
        if bad:
            raise ValueError(f"tiles {bad[0].meta} of {bad[0].tiles} are not numbers above 0")
        sources = {
            name: Source(s["digest"], s["raw"], tuple(s["files"]), s.get("extension", ""))
            for name, s in data["sources"].items()
        }
    except FileNotFoundError:
        return Table()
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        _log.warning("the tiles in %s are not as expected and are ignored: %s", path, error)
        return Table()
    return Table(sources, {entry.key: entry for entry in entries})
