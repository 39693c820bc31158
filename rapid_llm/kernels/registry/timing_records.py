"""Measured times on disk: one JSON file for each class of devices, first the user's own, then those that ship.

A file holds points. A point is one call, by op, dtype, scheme and the op's named dimensions, with the time of every row
that was measured on it in one interleaved run, and the order in which these rows rank there. `order` is decided when a
point is written, from the point that it replaces, and so does not flip where times differ by noise alone.

Times of a row hold for its source as it was then; those of other source are dropped when the row is written anew, and
rank nothing before that. Files are read at the first need, and only the device's own; one that cannot be read is
reported once and counts as absent.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from rapid_llm.platform import cpu_info, default_threads

from . import records, registry
from .errors import UnknownRowError
from .forking import Lock
from .records import SHIPPED, USER, Source
from .spec import KernelSpec, OpSpec
from .timings import Point, Timing, merged, order

if TYPE_CHECKING:
    from pathlib import Path

    from .facts import Facts

_log = logging.getLogger(__name__)

FORMAT: Final = 1
FOLDER: Final = "timings"

_lock: Final = Lock()
_tables: Final[dict[tuple[str, str], Table]] = {}
_moved: Final[dict[tuple[str, str], bool]] = {}


@dataclass(frozen=True, slots=True)
class Table:
    """A file's content. buckets: points by `bucket_key`."""

    kind: str
    sources: Mapping[str, Source] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    buckets: Mapping[tuple[object, ...], tuple[Point, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """The point that speaks of a call, and what of it still holds. rows: fresh times by name; order: those that rank.
    exact: whether the call is the measured one, and not just near it."""

    point: Point
    layer: str
    kind: str
    exact: bool
    rows: Mapping[str, Timing]
    order: tuple[str, ...]


def device_class(device: str, index: int | None = None) -> str | None:
    """The class that times hold for: as for evidence, and on a CPU its model and the number of threads too."""
    kind = records.device_class(device, index)
    if device != "cpu" or kind is None:
        return kind
    threads = default_threads()
    return f"{kind}, {cpu_info().model}, {threads} thread{'' if threads == 1 else 's'}"


def folder(layer: str) -> Path:
    """Where a layer's files lie; nothing is created."""
    return records.folder(layer) / FOLDER


def dims_of(op: OpSpec) -> tuple[str, ...]:
    """The dimensions that points of the op have: its own names but those that are usual in every point, or the element
    count where it has none."""
    return tuple(sorted(set(op.dims) - set(op.usual))) or ("numel",)


def bucket(size: int) -> int:
    """The power of two that a size falls to: the least one that is not below it; 0 of 0."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def bucket_key(
    op: str, dtype: str, scheme: str | None, dims: Iterable[tuple[str, int]]
) -> tuple[str, str, str | None, tuple[tuple[str, int], ...]]:
    """Calls with equal keys are ranked by the same points."""
    return op, dtype, scheme, tuple((name, bucket(size)) for name, size in sorted(dims))


def find(facts: Facts) -> Found | None:
    """The point that speaks of a call: of its bucket, the nearest one; the user's own before what ships."""
    if facts.dtype is None:
        return None
    dims = _dims(facts)
    kind = None if dims is None else device_class(facts.device, facts.index)
    if dims is None or kind is None:
        return None
    for layer in (USER, SHIPPED):
        known = table(layer, kind)
        points = known.buckets.get(bucket_key(facts.op, facts.dtype, facts.scheme, dims.items()))
        if points:
            point = min(points, key=lambda p: (_distance(p.dims, dims), sorted(p.dims.items())))
            rows = {name: t for name, t in point.rows.items() if holds(name, layer, known.sources)}
            order = tuple(name for name in point.order if name in rows)
            return Found(point, layer, kind, dict(point.dims) == dims, rows, order)
    return None


def has(op: str, facts: Facts) -> bool:
    """Whether any point of the facts' device speaks of `op`, so that its dimensions decide."""
    kind = device_class(facts.device, facts.index)
    return kind is not None and any(p.op == op for layer in (USER, SHIPPED) for p in table(layer, kind).points)


def limits(ops: Iterable[str], names: Iterable[str], device: str, index: int | None = None) -> set[int]:
    """Sizes of dimensions `names` that end a bucket with points of `ops` on a device, or come right before one: from
    one to the next, calls are ranked by the same points."""
    kind = device_class(device, index)
    wanted, counted = set(ops), set(names)
    points = [p for layer in (USER, SHIPPED) for p in table(layer, kind).points] if kind is not None else []
    sizes = {size for p in points if p.op in wanted for name, size in p.dims.items() if name in counted}
    return {end for size in sizes for end in (bucket(size), bucket(size) // 2) if end >= 1}


def _dims(facts: Facts) -> dict[str, int] | None:
    """The op's dimensions of a call; None where one is not given, or has a value that points are not of."""
    op = registry.get_op(facts.op)
    if any(facts.dims.get(name, values[0]) not in values for name, values in op.usual.items()):
        return None
    names = dims_of(op)
    found = {name: facts.dims[name] for name in names if name in facts.dims}
    return found if len(found) == len(names) else None


def _distance(one: Mapping[str, int], other: Mapping[str, int]) -> float:
    """How many doublings apart two shapes are, over all dimensions."""
    return sum(abs(math.log2(max(one.get(name, 0), 1) / max(size, 1))) for name, size in other.items())


def holds(name: str, layer: str, sources: Mapping[str, Source]) -> bool:
    """Whether times of a row are of the row that is registered now, with the source that it has now."""
    if layer == SHIPPED and not registry.is_shipped(name):
        return False  # another package's row of the same name is another row
    source = sources.get(name)
    if source is None:
        return False
    key = (name, source.digest)
    moved = _moved.get(key)
    if moved is None:
        moved = _moved[key] = _differs(name, source)
    return not moved


def _differs(name: str, source: Source) -> bool:
    try:
        spec = registry.get_row(name)
    except UnknownRowError:
        return True
    op = registry.get_op(spec.op)
    from . import digest  # here, because few processes ever need it

    if digest.raw_of(spec, op, source.files) == source.raw:
        return False
    now = digest.source_of(spec, op)
    if now is None or now.digest != source.digest:
        return True
    return bool(now.extension and source.extension and now.extension != source.extension)


def source_of(spec: KernelSpec) -> Source | None:
    """What a row is made of now; None for a row whose source cannot be read, which no record can speak of."""
    from . import digest  # here, because few processes ever need it

    return digest.source_of(spec, registry.get_op(spec.op))


# -- files ------------------------------------------------------------------------------------------------------------


def table(layer: str, kind: str) -> Table:
    """The points of a layer for a device class; read once a process."""
    path = folder(layer) / records.file_name(kind)
    key = (str(path), kind)
    with _lock:
        if key not in _tables:
            _tables[key] = load(path, kind)
        return _tables[key]


def forget() -> None:
    """Read files and sources again at the next need."""
    with _lock:
        _tables.clear()
        _moved.clear()


def path_of(layer: str, kind: str) -> Path:
    """The file of a layer for a device class."""
    return folder(layer) / records.file_name(kind)


def write(path: Path, kind: str, points: Sequence[Point], sources: Mapping[str, Source]) -> tuple[Point, ...]:
    """Merge `points` into the file at `path`, replacing those of the same calls, and settle the order of each.

    A point's `order` is what held when it was measured. sources: of every row in `points`. Answers the points as
    written. Times of a row's older source are dropped everywhere.
    """
    missing = sorted({name for p in points for name in p.rows} - set(sources))
    if missing:
        raise ValueError(f"{missing[0]}: its times cannot be recorded without its source")
    with _lock:
        old = load(path, kind)
        moved = {name for name, source in sources.items() if _other(old.sources.get(name), source)}
        kept = {p.key: _without(p, moved) for p in old.points}
        settled = []
        for key in dict.fromkeys(p.key for p in points):
            point = merged([p for p in points if p.key == key])
            before = kept[key].order if key in kept else ()
            ranked = order((*before, *point.order), point.rows, point.reach)
            kept[key] = replace(point, order=ranked)
            settled.append(kept[key])
        _save(path, kind, [p for p in kept.values() if p.rows], {**old.sources, **sources})
        forget()
    return tuple(settled)


def _other(old: Source | None, new: Source) -> bool:
    return old is not None and (old.digest, old.extension) != (new.digest, new.extension)


def _without(point: Point, names: set[str]) -> Point:
    rows = {name: timing for name, timing in point.rows.items() if name not in names}
    return replace(point, rows=rows, order=tuple(name for name in point.order if name in rows))


def _save(path: Path, kind: str, points: Sequence[Point], sources: Mapping[str, Source]) -> None:
    import json

    used = {name for p in points for name in p.rows}
    heads = [
        f"  {json.dumps(name)}: {json.dumps({k: v for k, v in asdict(sources[name]).items() if v})}"
        for name in sorted(used)
    ]
    lines = [f"  {json.dumps(_plain(p))}" for p in sorted(points, key=lambda p: str(p.key))]
    head, body = ",\n".join(heads), ",\n".join(lines)
    text = f'{{"format": {FORMAT}, "device": {json.dumps(kind)}, "sources": {{\n{head}\n}}, "points": [\n{body}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_text(text)
    os.replace(staged, path)


def _plain(point: Point) -> dict[str, Any]:
    rows = {
        name: [*(_short(v) for v in (t.us, t.p10, t.p90, t.ratio, t.low, t.high)), *t.flags]
        for name, t in sorted(point.rows.items())
    }
    fields = {name: getattr(point, name) for name in ("op", "dtype", "scheme", "baseline", "label", "date", "torch")}
    return {**fields, "dims": dict(point.dims), "reach": _short(point.reach), "order": list(point.order), "rows": rows}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def load(path: Path, kind: str) -> Table:
    """The table in a file; an empty one where there is none, or none of this class."""
    import json

    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT or data["device"] != kind:
            raise ValueError(f"it is of format {data['format']} and of {data['device']!r}")
        points = tuple(_point(fields) for fields in data["points"])
        sources = {
            name: Source(s["digest"], s["raw"], tuple(s["files"]), s.get("extension", ""))
            for name, s in data["sources"].items()
        }
    except FileNotFoundError:
        return Table(kind)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        _log.warning("the times in %s are not as expected and are ignored: %s", path, error)
        return Table(kind)
    buckets: dict[tuple[object, ...], tuple[Point, ...]] = {}
    for point in points:
        key = bucket_key(point.op, point.dtype, point.scheme, point.dims.items())
        buckets[key] = (*buckets.get(key, ()), point)
    return Table(kind, sources, points, buckets)


def _point(fields: dict[str, Any]) -> Point:
    rows = {}
    for name, (us, p10, p90, ratio, low, high, *flags) in fields["rows"].items():
        if not all(isinstance(v, float | int) and math.isfinite(v) and v > 0 for v in (us, ratio, low, high)):
            raise ValueError(f"{name} of {fields['op']}: a time or ratio is not above 0")
        rows[name] = Timing(us, p10, p90, ratio, low, high, tuple(flags))
    given = {name: fields[name] for name in ("op", "dtype", "scheme", "baseline", "reach", "label", "date", "torch")}
    ranked = tuple(name for name in fields["order"] if name in rows and rows[name].ranks)
    return Point(dims=dict(fields["dims"]), rows=rows, order=ranked, **given)
