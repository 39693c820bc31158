"""Which files of a folder are its weights: one file, a numbered set, or what an index names, and never a guess.

A tensor that is in two files is an error, and so is an index that names what isn't there or leaves out what is: the
wrong one of two tensors gives fluent nonsense. Files that hold other tensors under other names are left alone, aloud.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .errors import MetadataError, TensorSetError

_log = logging.getLogger(__name__)

NUMBERED: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)")
"""The name of one part of a set, in safetensors, torch's and GGUF's files alike; numbers start at 1."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of one set of weights; `index` and what it says (tensor -> file name) where there is one.

    strays: files of the same kind beside them, which may not hold any of the same tensors.
    """

    files: tuple[Path, ...]
    strays: tuple[Path, ...] = ()
    index: Path | None = None
    weight_map: Mapping[str, str] = field(default_factory=dict)


def numbered_set(part: Path) -> tuple[Path, ...]:
    """Every part of the set that `part` belongs to, in order; empty if its name isn't that of a part.

    Raises `TensorSetError` for parts that are missing.
    """
    match = NUMBERED.fullmatch(part.name)
    if match is None:
        return ()
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise TensorSetError(f"{part}: part {int(match['number'])} of {count} cannot be; parts count from 1")
    parts = tuple(
        part.with_name(f"{match['stem']}-{i:05}-of-{match['count']}{match['suffix']}") for i in range(1, count + 1)
    )
    missing = [p.name for p in parts if not p.is_file()]
    if missing:
        raise TensorSetError(
            f"{part.parent}: {len(missing)} of {count} parts are missing, {missing[0]} first; fetch the whole set"
        )
    return parts


def find_weights(folder: Path, files: Iterable[Path], single: str, index_name: str) -> WeightFiles:
    """The set of weights among `files`, all of one kind: what the index names, else `single`, else the one set there.

    Raises `TensorSetError` where several sets could be meant or files are missing, `MetadataError` for a broken index.
    """
    there = sorted(files)
    index = folder / index_name
    if index.is_file():
        weight_map = _read_index(index)
        named = sorted({folder / name for name in weight_map.values()})
        missing = [p.name for p in named if not p.is_file()]
        if missing:
            raise TensorSetError(
                f"{index} names {len(missing)} files that are missing, {missing[0]} first; fetch all again"
            )
        return WeightFiles(tuple(named), tuple(p for p in there if p not in named), index, weight_map)
    for path in there:
        if path.name == single or len(there) == 1:
            chosen = numbered_set(path) or (path,)
            return WeightFiles(chosen, tuple(p for p in there if p not in chosen))
    sets = {numbered_set(path) or (path,) for path in there}
    if len(sets) == 1:
        return WeightFiles(sets.pop())
    shown = ", ".join(p.name for p in there[:6]) + (" ..." if len(there) > 6 else "")
    raise TensorSetError(
        f"{folder} holds {len(sets)} sets of weights and no {index_name} says which is meant ({shown}); keep one"
    )


def merge(folder: Path, found: WeightFiles, names_of: Callable[[Path], Collection[str]]) -> dict[str, Path]:
    """Tensor -> its file, over all files of a set, once every rule of this module's docstring is checked."""
    owner: dict[str, Path] = {}
    for path in found.files:
        for name in names_of(path):
            if name in owner:
                raise TensorSetError(
                    f"{folder}: tensor '{name}' is in {owner[name].name} and in {path.name}; only one can be meant"
                )
            owner[name] = path
    if found.index is not None:
        _check_index(found.index, found.weight_map, owner)
    for path in found.strays:
        for name in names_of(path):
            if name in owner:
                raise TensorSetError(
                    f"{folder}: tensor '{name}' is in {owner[name].name} and in {path.name}, a file of another set; "
                    "take one of them out of the folder"
                )
    if found.strays:
        _log.warning("%s: not part of the model, and ignored: %s", folder, ", ".join(p.name for p in found.strays))
    return owner


def _check_index(index: Path, weight_map: Mapping[str, str], owner: Mapping[str, Path]) -> None:
    for name, file in weight_map.items():
        if name not in owner:
            raise TensorSetError(f"{index} places tensor '{name}' in {file}, which does not hold it; fetch both again")
        if owner[name].name != file:
            raise TensorSetError(f"{index} places tensor '{name}' in {file}, but {owner[name].name} holds it")
    left = [name for name in owner if name not in weight_map]
    if left:
        raise TensorSetError(
            f"{index} leaves out {len(left)} tensors, '{left[0]}' of {owner[left[0]].name} first; fetch both again"
        )


def _read_index(index: Path) -> dict[str, str]:
    data = read_json(index)
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MetadataError(f"{index}: 'weight_map' is {weight_map!r:.60}, not a table of tensors and files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise MetadataError(f"{index}: tensor '{name}' is placed in {file!r}, which is no file of this folder")
    return weight_map


def read_json(path: Path) -> dict[str, object]:
    """A file that holds one JSON object without repeated keys; raises `MetadataError` naming file and place."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) != len(pairs):
            keys = [key for key, _ in pairs]
            raise MetadataError(f"{path}: the key '{next(k for k in keys if keys.count(k) > 1)}' appears twice")
        return made

    try:
        data = json.loads(path.read_bytes(), object_pairs_hook=once)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MetadataError(f"{path} is not JSON: {error}; fetch it again") from None
    if not isinstance(data, dict):
        raise MetadataError(f"{path} holds a JSON {type(data).__name__}, not an object")
    return data
