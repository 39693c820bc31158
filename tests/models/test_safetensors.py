"""The safetensors reader against the `safetensors` package, and against files and folders that lie about themselves."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from rapid_llm.models import mapped
from rapid_llm.models.errors import (
    BadMagicError,
    MetadataError,
    ModelError,
    TensorSetError,
    TruncatedFileError,
    UnknownTypeError,
)
from rapid_llm.models.safetensors import DTYPES, INDEX, SafetensorsFile, SafetensorsFolder


def raw_file(path: Path, header: Any, body: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def shards(folder: Path, *parts: dict[str, torch.Tensor], index: dict[str, str] | None = None) -> Path:
    """A folder of numbered files; `index` replaces the true index, and {} leaves it out."""
    weight_map = {}
    for i, tensors in enumerate(parts, 1):
        name = f"model-{i:05}-of-{len(parts):05}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    if index != {}:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index or weight_map}))
    return folder


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    return (
        a.dtype == b.dtype and a.shape == b.shape and a.flatten().view(torch.uint8).equal(b.flatten().view(torch.uint8))
    )


def test_every_dtype_equals_the_safetensors_package(tmp_path: Path) -> None:
    """Catches a wrong width or torch dtype of any entry of the table, and a tensor read from another's place."""
    path = tmp_path / "model.safetensors"
    tensors = {}
    for label, (name, width) in DTYPES.items():
        data = torch.randint(0, 2 if label == "BOOL" else 120, (3 * 5 * width,), dtype=torch.uint8)
        tensors[label] = data.view(getattr(torch, name)).view(3, 5)
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "vector": torch.arange(7)}
    save_file(tensors, path, metadata={"format": "pt"})
    file = SafetensorsFile(path)
    with safe_open(path, "pt") as oracle:
        assert set(file.tensors) == set(oracle.keys())
        for name in oracle.keys():  # noqa: SIM118  (no mapping)
            assert same(file.data(name), oracle.get_tensor(name)), name
            assert file.tensors[name].shape == tuple(oracle.get_slice(name).get_shape())
    assert file.metadata == {"format": "pt"}


def test_an_odd_header_length_does_not_misalign(tmp_path: Path) -> None:
    """Catches a view at an address that isn't a multiple of the element's size, where the header wasn't padded."""
    want = torch.arange(4, dtype=torch.float64)
    header = json.dumps({"a": entry("F64", [4], 0, 32)}).encode()
    for pad in range(8):
        path = raw_file(tmp_path / "m.safetensors", header + b" " * pad, want.numpy().tobytes())
        got = SafetensorsFile(path).data("a")
        assert got.equal(want)
        assert got.data_ptr() % 8 == 0


def test_views_and_bounded_residency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a copy per tensor, a view that dies with its file, and pages given back that lose what they held."""
    monkeypatch.setattr(mapped, "WINDOW", 8192)
    want = {f"t{i}": torch.full((1024,), float(i)) for i in range(8)}
    save_file(want, tmp_path / "model.safetensors")
    source = SafetensorsFolder(tmp_path)
    assert source.data("t0").data_ptr() == source.data("t0").data_ptr()
    views = {name: source.data(name) for name in source.names()}
    del source
    assert all(same(views[name], want[name]) for name in want)


def test_a_single_file_and_shards_are_one_set_of_tensors(tmp_path: Path) -> None:
    """Catches shards that are skipped, and sets that need an index although their numbers are complete."""
    a, b = {"x": torch.ones(2, 3)}, {"y": torch.arange(4), "z": torch.zeros(1)}
    for i, index in enumerate((None, {})):
        folder = tmp_path / str(i)
        folder.mkdir()
        source = SafetensorsFolder(shards(folder, a, b, index=index))
        assert set(source.names()) == {"x", "y", "z"}
        assert (source.shape("x"), source.dtype("y"), source.nbytes("z")) == ((2, 3), "int64", 4)
        assert same(source.data("y"), b["y"])
        with pytest.raises(TensorSetError, match=r"'w' is missing"):
            source.data("w")


def test_a_tensor_in_two_shards_is_fatal(tmp_path: Path) -> None:
    """E25: catches the second of two shards silently winning, with an index and without."""
    a, b = {"x": torch.ones(2), "y": torch.ones(1)}, {"x": torch.zeros(2)}
    for i, index in enumerate((None, {})):
        folder = tmp_path / str(i)
        folder.mkdir()
        shards(folder, a, b, index=index)
        with pytest.raises(TensorSetError, match=r"'x' is in model-00001-of-00002\S+ and in model-00002-of-00002"):
            SafetensorsFolder(folder)


def test_the_index_is_checked_both_ways(tmp_path: Path) -> None:
    """Catches an index that names what isn't there, leaves out what is, or places it elsewhere."""
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    parts = {"x": torch.ones(2)}, {"y": torch.ones(2)}
    cases = [
        ({"x": first, "y": second, "ghost": second}, r"places tensor 'ghost' in model-00002.*does not hold it"),
        ({"x": first, "y": first}, r"places tensor 'y' in model-00001-of-00002.safetensors, which does not hold it"),
        ({"x": second, "y": first}, r"places tensor 'x' in model-00002.*but model-00001-of-00002.safetensors holds it"),
        ({"x": first, "y": "gone.safetensors"}, r"names 1 files that are missing, gone.safetensors first"),
    ]
    for i, (index, match) in enumerate(cases):
        folder = tmp_path / str(i)
        folder.mkdir()
        with pytest.raises(TensorSetError, match=match):
            SafetensorsFolder(shards(folder, *parts, index=index))
    folder = tmp_path / "left"
    folder.mkdir()
    both = {"x": torch.ones(2), "extra": torch.ones(2)}
    with pytest.raises(TensorSetError, match=r"leaves out 1 tensors, 'extra' of model-00001"):
        SafetensorsFolder(shards(folder, both, parts[1], index={"x": first, "y": second}))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"weight_map": {"x": "../m.safetensors"}}', r"'x' is placed in '../m.safetensors', which is no file of this"),
        ('{"weight_map": {"x": 3}}', "'x' is placed in 3"),
        ('{"weight_map": {}}', "'weight_map' is {}"),
        ('{"weight_map": {"x": "a", "x": "b"}}', "the key 'x' appears twice"),
        ("[]", "holds a JSON list"),
        ("{", "is not JSON"),
    ],
)
def test_a_broken_index_is_named(tmp_path: Path, text: str, match: str) -> None:
    """Catches an index that leads out of the folder, and raw errors of the JSON parser."""
    shards(tmp_path, {"x": torch.ones(1)})
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(MetadataError, match=match):
        SafetensorsFolder(tmp_path)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    """Catches a model loaded without one of its shards where no index tells."""
    shards(tmp_path, {"x": torch.ones(1)}, {"y": torch.ones(1)}, index={})
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(TensorSetError, match=r"1 of 2 parts are missing, model-00002-of-00002.safetensors first"):
        SafetensorsFolder(tmp_path)


def test_stray_sets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches one of two sets taken by chance, and a foreign file beside a set read as a part of it."""
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    save_file({"lora.x": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert set(SafetensorsFolder(tmp_path).names()) == {"x"}
    assert "adapter_model.safetensors" in caplog.text
    save_file({"x": torch.ones(1)}, tmp_path / "model.fp16.safetensors")
    with pytest.raises(TensorSetError, match=r"'x' is in model.safetensors and in model.fp16.safetensors, a file of"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(TensorSetError, match=r"2 sets of weights .* \(adapter_model.safetensors, model.fp16"):
        SafetensorsFolder(tmp_path)


def test_an_index_and_a_single_file_of_the_same_tensors(tmp_path: Path) -> None:
    """Catches a choice between two whole sets in one folder (E25 over files that no index names)."""
    shards(tmp_path, {"x": torch.ones(1)}, {"y": torch.ones(1)})
    save_file({"x": torch.ones(1), "y": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(TensorSetError, match=r"and in model.safetensors, a file of another set"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("header", "body", "error", "match"),
    [
        ({"t": entry("F32", [2], 0, 8)}, 4, TruncatedFileError, r"tensor 't' ends at byte"),
        ({"t": entry("F32", [3], 0, 8)}, 8, TensorSetError, r"tensor 't': bytes 0 to 8 are 8, not the 12"),
        ({"t": entry("F5", [2], 0, 8)}, 8, UnknownTypeError, r"tensor 't' has the unknown dtype 'F5'; known: BOOL"),
        ({"t": entry("F32", [-2], 0, 8)}, 8, MetadataError, r"tensor 't' has shape \[-2\]"),
        ({"t": entry("F32", [2], 8, 0)}, 8, TensorSetError, "bytes 8 to 0"),
        ({"t": entry("F32", [2], 0, 8) | {"x": 1}}, 8, MetadataError, "tensor 't' is described by"),
        ({"t": 3}, 8, MetadataError, "tensor 't' is described by 3"),
        (
            {"t": entry("F32", [2], 0, 8), "u": entry("F32", [2], 4, 12)},
            12,
            TensorSetError,
            "tensor 'u' overlaps tensor 't'",
        ),
        ({"t": entry("F32", [2], 4, 12)}, 12, TensorSetError, "'t' leaves 4 unexplained bytes after the header"),
        ({"t": entry("F32", [2], 0, 8)}, 9, TensorSetError, "1 unexplained bytes follow tensor 't'"),
        (b'{"t":1,"t":2}', 0, TensorSetError, "'t' appears twice"),
        (b"{", 0, BadMagicError, "header is not JSON"),
        (b"\xff", 0, BadMagicError, "header is not JSON"),
        (b"[]", 0, MetadataError, "header is a JSON list"),
        ({"__metadata__": 3}, 0, MetadataError, "__metadata__ is 3"),
    ],
)
def test_headers_that_lie(tmp_path: Path, header: Any, body: int, error: type[ModelError], match: str) -> None:
    """Catches bytes shared by two tensors, reads past the end, and errors without the file's or the tensor's name."""
    path = raw_file(tmp_path / "bad.safetensors", header, bytes(body))
    with pytest.raises(error, match=match) as caught:
        SafetensorsFile(path)
    assert "bad.safetensors" in str(caught.value)


def test_any_cut_is_a_typed_error(tmp_path: Path) -> None:
    """Catches a read past the end: every prefix of a file is refused."""
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(3, 3), "b": torch.zeros(5)}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises((TruncatedFileError, BadMagicError)):
            SafetensorsFile(path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_headers_never_raise_anything_else(tmp_path: Path, edits: list[tuple[int, int]]) -> None:
    """Catches overflows, giant allocations and raw errors on corrupt lengths, offsets and JSON."""
    path = tmp_path / "damaged.safetensors"
    save_file({"a": torch.ones(3, 3), "b": torch.zeros(5, dtype=torch.int16)}, path)
    data = bytearray(path.read_bytes())
    for at, value in edits:
        data[at % len(data)] = value
    path.write_bytes(data)
    text = "damaged.safetensors is still readable"
    try:
        file = SafetensorsFile(path)
        for name in file.tensors:
            file.data(name)
    except ModelError as error:
        text = str(error)
    assert "damaged.safetensors" in text


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    """Catches a pickle or a web page under the wrong name taken for a header of many gigabytes."""
    path = tmp_path / "page.safetensors"
    path.write_bytes(b"<!doctype html><html>")
    with pytest.raises(BadMagicError, match=r"page.safetensors: starts with b'<!doctyp'"):
        SafetensorsFile(path)
