"""GGUF in parts: the parts are one model, or an error says which of them isn't."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.errors import MetadataError, TensorSetError
from rapid_llm.models.gguf import GGUFFile
from rapid_llm.models.gguf_source import PLAIN, GGUFSource
from rapid_llm.models.gguf_split import open_gguf
from tests.models import tiny


def split(folder: Path, parts: int = 3, **entries: int) -> tuple[Path, tiny.TinyModel]:
    """A tiny model cut by the `gguf` package's own writer; entries: `split.*` values to be wrong, of every part."""
    model = tiny.make(folder / "whole.gguf")
    whole = GGUFFile(model.path)
    tensors = list(whole.tensors)
    share = -(-len(tensors) // parts)
    for number in range(parts):
        own = {"split.count": parts, "split.tensors.count": len(tensors), "split.no": number, **entries}
        meta = {**tiny.metadata(model.shape), **own} if number == 0 else own
        data = {
            n: whole.data(n).view(np.float32).reshape(whole.tensors[n].shape) for n in tensors[number * share :][:share]
        }
        tiny.write(folder / f"m-{number + 1:05}-of-{parts:05}.gguf", "llama", meta, data)
    return folder / f"m-00001-of-{parts:05}.gguf", model


@pytest.mark.parametrize("asked", [1, 3])
def test_all_parts_are_one_model(tmp_path: Path, asked: int) -> None:
    """Catches tensors read from the wrong part, parts left out, and a model that only its first part can name."""
    first, model = split(tmp_path)
    file = open_gguf(first.with_name(f"m-{asked:05}-of-00003.gguf"))
    whole = GGUFFile(model.path)
    assert file.path == first
    assert set(file.tensors) == set(whole.tensors)
    for name in whole.tensors:
        assert np.array_equal(file.data(name), whole.data(name)), name
    assert not [key for key in file if key.startswith("split.")]
    assert ModelConfig.from_gguf(file).num_layers == tiny.LAYERS
    assert file.size == sum(p.stat().st_size for p in tmp_path.glob("m-*"))


def test_a_whole_file_stays_one(tmp_path: Path) -> None:
    """Catches a file taken for a part because of its name, or refused for a count of one."""
    model = tiny.make(tmp_path / "m-00001-of-00002.gguf", entries={"split.count": 1})
    assert len(open_gguf(model.path).tensors) == len(GGUFFile(model.path).tensors)


def test_parts_that_do_not_add_up(tmp_path: Path) -> None:
    """Catches a missing, renamed, foreign or repeated part."""
    first, _ = split(tmp_path)
    second = tmp_path / "m-00002-of-00003.gguf"
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(TensorSetError, match=r"1 of 3 parts are missing, m-00002-of-00003.gguf first"):
        open_gguf(first)
    second.write_bytes(first.read_bytes())
    with pytest.raises(MetadataError, match=r"m-00002-of-00003.gguf: split.no is 0, not 1"):
        open_gguf(first)
    second.write_bytes(kept)
    other = first.rename(tmp_path / "other.gguf")
    with pytest.raises(TensorSetError, match=r"other.gguf is one of 3 parts of a model; name them as the splitter did"):
        open_gguf(other)


def test_parts_of_another_count(tmp_path: Path) -> None:
    """Catches parts of two models under one name: the sums that each states differ."""
    first, _ = split(tmp_path, **{"split.tensors.count": 7})
    with pytest.raises(TensorSetError, match=r"3 parts hold 20 tensors, and split.tensors.count says 7"):
        open_gguf(first)


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    """E25 for GGUF: catches the later of two equal names winning."""
    for number in range(2):
        entries = {"split.count": 2, "split.tensors.count": 2, "split.no": number}
        tiny.write(tmp_path / f"m-0000{number + 1}-of-00002.gguf", "llama", entries, {"t": np.zeros(32, np.float32)})
    with pytest.raises(TensorSetError, match=r"m-00002-of-00002.gguf: tensor 't' is in m-00001-of-00002.gguf too"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_as_a_source(tmp_path: Path) -> None:
    """Catches plain numbers of a wrong dtype, and blocks whose last axis isn't bytes a row (experts included)."""
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(0)
    experts = rng.standard_normal((3, 4, 64)).astype(np.float32)
    half = rng.standard_normal((2, 6)).astype(np.float16)
    blocks = gguf.quants.quantize(experts, gguf.GGMLQuantizationType.Q8_0)
    tiny.write(path, "llama", {}, {"e": blocks, "h": half}, {"e": gguf.GGMLQuantizationType.Q8_0})
    source = GGUFSource(open_gguf(path))
    assert (source.shape("e"), source.dtype("e"), source.nbytes("e")) == ((3, 4, 64), "Q8_0", 3 * 4 * 68)
    assert source.data("e").equal(torch.from_numpy(blocks))
    assert source.data("e").shape == (3, 4, 68)
    assert (source.dtype("h"), source.data("h").dtype) == ("float16", torch.float16)
    assert source.data("h").equal(torch.from_numpy(half))
    with pytest.raises(TensorSetError, match="'x' is missing"):
        source.shape("x")


def test_the_names_of_plain_types() -> None:
    """Catches a name that torch doesn't know, or of another width than ggml's."""
    for kind, name in PLAIN.items():
        assert getattr(torch, name).itemsize == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
