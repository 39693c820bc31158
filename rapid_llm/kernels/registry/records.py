"""Evidence on disk: one JSON file for each class of devices, first the user's own, then those that ship.

A file holds, for every row that a run proved on such a device, what the row was made of then (`digest.Source`) and one
proof for each dtype and scheme. Files are read at the first need, and only the device's own. A file is replaced whole,
by a rename; a file that cannot be read is reported once and counts as absent.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from rapid_llm import settings
from rapid_llm.platform import cpu_info, device_info

from .forking import Lock

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)

FORMAT: Final = 1
SHIPPED: Final = "shipped"
USER: Final = "user"

_LEVELS: Final = (
    ("avx512_bf16", ("avx512f", "avx512bw", "avx512vl", "avx512_bf16")),
    ("avx512", ("avx512f", "avx512bw", "avx512vl")),
    ("avx2", ("avx2", "fma", "f16c")),
)
"""What decides which of torch's and our own kernels a CPU runs; the richest first."""

_lock: Final = Lock()
_tables: Final[dict[tuple[str | None, ...], dict[str, Record]]] = {}
_HOMES: Final = ("RAPID_LLM_CACHE_DIR", "XDG_CACHE_HOME", "HOME")
"""Variables that say where the user's own records are."""
_reads = [0]


@dataclass(frozen=True, slots=True)
class Source:
    """What a row is made of. files: names relative to the folder that holds the package. digest: of what they mean.
    extension: the same for sources outside of the package, which an installed package lacks; "" if there are none."""

    digest: str
    raw: str
    files: tuple[str, ...]
    extension: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """What a full run over one dtype and scheme of a row saw.

    seeds: of the random inputs. worst_ulp, worst_ratio: the largest error, in ulps of the output and as a share of its
    derived bound; worst_norm: the largest root mean square of such shares over a row. mutants: wrong rows that the same
    cases refused; of: how many were tried. torch, toolchain: versions of the run, for the reader: they decide nothing.
    """

    cases: int
    calls: int
    elements: int
    seeds: int
    worst_ulp: float
    worst_ratio: float
    mutants: int
    of: int
    torch: str
    toolchain: str
    date: str
    worst_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Record:
    """A row's source at the time, and its proofs by `proof_key`."""

    source: Source
    proofs: Mapping[str, Proof]


def proof_key(dtype: str, scheme: str | None) -> str:
    """`bf16`, or `bf16 q8_0` for an op with schemes."""
    return dtype if scheme is None else f"{dtype} {scheme}"


def device_class(device: str, index: int | None = None) -> str | None:
    """`cuda sm_90 NVIDIA H200`, `cpu avx512`; None where the device cannot be looked at."""
    if device == "cpu":
        isa = set(cpu_info().isa)
        level = next((name for name, needs in _LEVELS if isa.issuperset(needs)), None)
        return f"cpu {level or os.uname().machine}"
    info = device_info(device if index is None else f"{device}:{index}")
    return None if info.sm is None else f"{device} sm_{info.sm} {info.name}"


def file_name(kind: str) -> str:
    """The name of the file of a device class."""
    return re.sub(r"[^a-z0-9_]+", "-", kind.lower()).strip("-") + ".json"


def folder(layer: str) -> Path:
    """Where a layer's files lie; nothing is created."""
    from pathlib import Path

    return Path(__file__).parent.parent / "records" if layer == SHIPPED else settings.cache_dir() / "records"


def table(layer: str, kind: str) -> dict[str, Record]:
    """The records of a layer for a device class, by row; read once a process."""
    key = (layer, kind, *(() if layer == SHIPPED else homes()))
    with _lock:
        if key not in _tables:  # asked thousands of times for one model: no path is made for a table that is known
            _tables[key] = _load(folder(layer) / file_name(kind), kind)
        return _tables[key]


def homes() -> tuple[str | None, ...]:
    """What the environment says of where the user's own records are."""
    return tuple(map(os.environ.get, _HOMES))


def version() -> int:
    """A number that grows whenever files are to be read again."""
    return _reads[0]


def forget() -> None:
    """Read the files again at the next need."""
    with _lock:
        _tables.clear()
        _reads[0] += 1


def write(path: Path, kind: str, new: Mapping[str, Record], gone: Mapping[str, set[str]]) -> None:
    """Merge `new` records into the file at `path`; `gone` are proof keys, by row, that no longer hold.

    Proofs of another source than the new one are dropped: they speak of code that is no more.
    """
    import json

    with _lock:
        rows = dict(_load(path, kind))
        for name, keys in gone.items():
            if name in rows:
                kept = {k: p for k, p in rows[name].proofs.items() if k not in keys}
                rows[name] = Record(rows[name].source, kept)
        for name, record in new.items():
            old = rows.get(name)
            same = old is not None and (old.source.digest, old.source.extension) == (
                record.source.digest,
                record.source.extension,
            )
            before = old.proofs if same and old is not None else {}
            rows[name] = Record(record.source, {**before, **record.proofs})
        lines = [
            f"  {json.dumps(name)}: {json.dumps(_plain(rows[name]))}" for name in sorted(rows) if rows[name].proofs
        ]
        text = ",\n".join(lines)
        body = f'{{"format": {FORMAT}, "device": {json.dumps(kind)}, "rows": {{\n{text}\n}}}}\n'
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        staged.write_text(body)
        os.replace(staged, path)
        _tables.clear()
        _reads[0] += 1


def _plain(record: Record) -> dict[str, Any]:
    source = {k: v for k, v in asdict(record.source).items() if v}
    return {**source, "proofs": {k: asdict(record.proofs[k]) for k in sorted(record.proofs)}}


def _load(path: Path, kind: str) -> dict[str, Record]:
    import json

    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _log.warning("the records in %s cannot be read and are ignored: %s", path, error)
        return {}
    try:
        if data["format"] != FORMAT or data["device"] != kind:
            raise ValueError(f"it is of format {data['format']} and of {data['device']!r}")
        return {name: _record(fields) for name, fields in data["rows"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        _log.warning("the records in %s are not as expected and are ignored: %s", path, error)
        return {}


def _record(fields: dict[str, Any]) -> Record:
    source = Source(fields["digest"], fields["raw"], tuple(fields["files"]), fields.get("extension", ""))
    return Record(source, {key: Proof(**proof) for key, proof in fields["proofs"].items()})
