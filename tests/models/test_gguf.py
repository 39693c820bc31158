"""The GGUF reader against the `gguf` package, and against files that lie about themselves."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rapid_llm.models.errors import (
    BadMagicError,
    MetadataError,
    ModelError,
    TensorSetError,
    TruncatedFileError,
    UnknownTypeError,
)
from rapid_llm.models.gguf import TENSOR_TYPES, GGUFFile
from tests.counting import python_calls
from tests.models import tiny

ENTRIES = {
    "a.bool": True,
    "a.int": 7,
    "a.float": 0.5,
    "a.text": "naïve ⊕",
    "a.texts": ["x", "", "long " * 50],
    "a.ints": [1, -2, 3],
    "a.floats": [0.25, -1.5],
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    rng = np.random.default_rng(0)
    tensors = {"m": rng.standard_normal((3, 64)).astype(np.float32), "v": np.arange(5, dtype=np.float32)}
    tiny.write(path, "llama", ENTRIES, tensors)
    return path


def raw_file(tmp_path: Path, body: bytes, *, version: int = 3, tensors: int = 0, entries: int = 0) -> Path:
    path = tmp_path / "raw.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + body)
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor_info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def test_metadata_of_every_kind_equals_what_was_written(small: Path) -> None:
    """Catches a wrong width, sign or offset of any value type, and arrays decoded from the wrong place."""
    file = GGUFFile(small)
    for key, value in ENTRIES.items():
        assert file[key] == (tuple(value) if isinstance(value, list) else value), key
    assert file["general.architecture"] == "llama"
    assert file["a.texts"] is file["a.texts"]


def test_every_scalar_type(tmp_path: Path) -> None:
    """Catches a value type id mapped to another format."""
    path = tmp_path / "scalars.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    written = {"uint8": 200, "int8": -100, "uint16": 60_000, "int16": -30_000, "uint32": 4_000_000_000}
    written |= {"int32": -2_000_000_000, "uint64": 2**63 + 1, "int64": -(2**62), "float64": 0.1}
    for name, value in written.items():
        getattr(writer, f"add_{name}")(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    assert {name: file[name] for name in written} == written


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_tensors_lie_where_the_gguf_package_finds_them(tmp_path: Path, alignment: int) -> None:
    """Catches reversed shapes, an ignored alignment, and offsets taken from the wrong start."""
    path = tmp_path / "aligned.gguf"
    rng = np.random.default_rng(1)
    tensors = {"a": rng.standard_normal((5, 32)).astype(np.float32), "b": rng.standard_normal(3).astype(np.float16)}
    tiny.write(path, "llama", {}, tensors, alignment=alignment)
    file = GGUFFile(path)
    for tensor in gguf.GGUFReader(path).tensors:
        info = file.tensors[tensor.name]
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert file.data(tensor.name).tobytes() == tensors[tensor.name].tobytes()


def test_block_sizes_equal_the_gguf_packages() -> None:
    """Catches a wrong size in the table of tensor types, which would shift every later check."""
    for kind, (name, block, width) in TENSOR_TYPES.items():
        assert gguf.GGMLQuantizationType(kind).name == name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == (block, width)


def test_version_2_is_read_and_others_refused(tmp_path: Path) -> None:
    """Catches a reader that takes version 1's 32-bit counts, or a big-endian file, for something else."""
    assert GGUFFile(raw_file(tmp_path, b"", version=2)).version == 2
    with pytest.raises(BadMagicError, match="version 1"):
        GGUFFile(raw_file(tmp_path, b"", version=1))
    with pytest.raises(BadMagicError, match="big-endian"):
        GGUFFile(raw_file(tmp_path, b"", version=3 << 24))


@pytest.mark.parametrize("head", [b"GGML", b"PK\x03\x04rest of a zip", b"<html>", b"ggjt"])
def test_other_files_are_refused_by_name(tmp_path: Path, head: bytes) -> None:
    """Catches an error that does not say which file, and what it starts with."""
    path = tmp_path / "other.bin"
    path.write_bytes(head)
    with pytest.raises(BadMagicError, match=r"other\.bin") as caught:
        GGUFFile(path)
    assert repr(head[:4]) in str(caught.value)


def test_any_cut_is_a_typed_error(small: Path, tmp_path: Path) -> None:
    """Catches a read past the end: every prefix of a file is refused, none crashes or is taken for whole."""
    whole = small.read_bytes()
    last = max(info.offset + info.nbytes for info in GGUFFile(small).tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in [*range(200), *range(200, last, 37), last - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(TruncatedFileError, match="incomplete"):
            GGUFFile(cut)
    cut.write_bytes(whole[:last])
    assert len(GGUFFile(cut).tensors) == 2


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_headers_never_raise_anything_else(small: Path, tmp_path: Path, edits: list[tuple[int, int]]) -> None:
    """Catches overflows, giant allocations and raw struct errors on corrupt counts, types and offsets."""
    data = bytearray(small.read_bytes())
    for at, value in edits:
        data[at % len(data)] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    try:
        file = GGUFFile(path)
        for key in file:
            _ = file[key]
        for name in file.tensors:
            file.data(name)
    except ModelError as error:
        text = str(error)
    else:
        text = "damaged.gguf is still readable"
    assert "damaged.gguf" in text


def test_huge_counts_allocate_nothing(tmp_path: Path) -> None:
    """Catches a count believed before it is checked against the file's size."""
    array = text("k") + struct.pack("<IIQ", 9, 8, 2**62)
    for body, entries, tensors in (
        (array, 1, 0),
        (b"", 2**63, 0),
        (b"", 0, 2**63),
        (struct.pack("<Q", 2**64 - 1), 1, 0),
    ):
        with pytest.raises(TruncatedFileError):
            GGUFFile(raw_file(tmp_path, body, entries=entries, tensors=tensors))


def test_a_string_length_beyond_the_file_inside_an_array(tmp_path: Path) -> None:
    """Catches a walk over string lengths that trusts them: the sum may pass any machine integer."""
    body = text("k") + struct.pack("<IIQ", 9, 8, 2) + struct.pack("<QQ", 2**64 - 1, 0)
    with pytest.raises(TruncatedFileError, match="'k'"):
        GGUFFile(raw_file(tmp_path, body, entries=1))


def test_unknown_types_name_what_has_them(tmp_path: Path) -> None:
    """Catches an unknown type taken for a known one, or reported without its name."""
    with pytest.raises(UnknownTypeError, match=r"'k'.*value type 77"):
        GGUFFile(raw_file(tmp_path, text("k") + struct.pack("<I", 77), entries=1))
    with pytest.raises(UnknownTypeError, match=r"'k'.*arrays"):
        GGUFFile(raw_file(tmp_path, text("k") + struct.pack("<IIQ", 9, 9, 0), entries=1))
    with pytest.raises(UnknownTypeError, match=r"'t'.*ggml type 4;.*Q4_0"):
        GGUFFile(raw_file(tmp_path, tensor_info("t", (32,), 4, 0), tensors=1))


def test_duplicates_are_refused(tmp_path: Path) -> None:
    """Catches the second of two equal names silently winning."""
    entry = text("k") + struct.pack("<II", 4, 1)
    with pytest.raises(MetadataError, match=r"'k' appears twice"):
        GGUFFile(raw_file(tmp_path, entry * 2, entries=2))
    info = tensor_info("t", (32,), 0, 0)
    with pytest.raises(TensorSetError, match="'t' appears twice"):
        GGUFFile(raw_file(tmp_path, info * 2 + bytes(256), tensors=2))


@pytest.mark.parametrize(
    ("info", "match"),
    [
        (tensor_info("t", (33, 2), 2, 0), "blocks of 32"),
        (tensor_info("t", (0, 2), 0, 0), "shape"),
        (tensor_info("t", (4,), 0, 7), "multiple of 32"),
        (tensor_info("t", (1,) * 5, 0, 0), "5 dimensions"),
    ],
)
def test_impossible_tensors_are_refused(tmp_path: Path, info: bytes, match: str) -> None:
    """Catches broken blocks, empty tensors and misplaced data being read as numbers."""
    with pytest.raises(TensorSetError, match=match):
        GGUFFile(raw_file(tmp_path, info + bytes(256), tensors=1))


def test_entries_are_asked_for_by_type(small: Path) -> None:
    """Catches a text taken for a number, and a missing key answered by None."""
    file = GGUFFile(small)
    assert file.require("a.int", int) == 7
    assert file.require("a.int", float) == 7.0
    assert file.optional("a.none", int, 5) == 5
    with pytest.raises(MetadataError, match=r"'a.text' is 'na.*not a int"):
        file.optional("a.text", int, 0)
    with pytest.raises(MetadataError, match=r"'a.bool' is True"):
        file.require("a.bool", int)
    with pytest.raises(MetadataError, match=r"'a.none' is missing"):
        file.require("a.none", int)


def test_invalid_utf8_names_the_key_and_the_element(tmp_path: Path) -> None:
    """Catches a raw UnicodeDecodeError, or replacement characters in a vocabulary."""
    body = text("k") + struct.pack("<IIQ", 9, 8, 2) + text("ok") + struct.pack("<Q", 1) + b"\xff"
    file = GGUFFile(raw_file(tmp_path, body, entries=1))
    with pytest.raises(MetadataError, match=r"'k'\[1\]"):
        _ = file["k"]


@pytest.mark.model
def test_the_default_model_equals_what_the_gguf_package_reads(model_path: Path) -> None:
    """Catches any difference of content."""
    oracle = gguf.GGUFReader(model_path)
    contents = {key: found.contents() for key, found in oracle.fields.items() if not key.startswith("GGUF.")}
    file = GGUFFile(model_path)
    assert dict(file) == {key: tuple(value) if isinstance(value, list) else value for key, value in contents.items()}
    for tensor in oracle.tensors:
        info = file.tensors[tensor.name]
        assert (info.type, info.offset, info.nbytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)


@pytest.mark.model
def test_opening_calls_nothing_for_each_string(model_path: Path) -> None:
    """Catches a slow walk over 98k strings, with the vocabulary decoded."""

    def read() -> None:
        file = GGUFFile(model_path)
        assert len(file.require("tokenizer.ggml.tokens", tuple)) > 40_000
        assert len(file.require("tokenizer.ggml.merges", tuple)) > 40_000

    assert python_calls(read) < 20_000
