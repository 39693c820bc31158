"""Which format a path is, and pickles: refused, or read by the unpickler that runs nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rapid_llm.models.errors import TensorSetError, UnknownModelError, UnsafeWeightsError
from rapid_llm.models.opening import open_source
from tests.models import tiny

MATRIX = torch.arange(6, dtype=torch.bfloat16).view(2, 3)


def gguf(path: Path) -> Path:
    tiny.write(path, "llama", {}, {"m": np.arange(64, dtype=np.float32).reshape(2, 32)})
    return path


def test_each_format_by_its_path(tmp_path: Path) -> None:
    """Catches a folder or file opened as another format, and shapes or dtypes that differ between formats."""
    file = gguf(tmp_path / "m.gguf")
    for path in (file, tmp_path):
        source = open_source(path)
        assert (source.path, source.shape("m"), source.dtype("m")) == (file, (2, 32), "float32")
        assert source.data("m").tolist() == torch.arange(64.0).view(2, 32).tolist()
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"m": MATRIX}, folder / "model.safetensors")
    source = open_source(folder)
    assert (source.shape("m"), source.dtype("m")) == ((2, 3), "bfloat16")
    assert source.data("m").equal(MATRIX)


def test_two_models_in_one_folder_are_refused(tmp_path: Path) -> None:
    """Catches one of two models taken by the order of their names."""
    gguf(tmp_path / "a.gguf")
    save_file({"m": MATRIX}, tmp_path / "model.safetensors")
    with pytest.raises(TensorSetError, match=r"holds a.gguf beside safetensors; give the path"):
        open_source(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    gguf(tmp_path / "b.gguf")
    with pytest.raises(TensorSetError, match=r"holds a.gguf, b.gguf; give the path"):
        open_source(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "x.pt"])
def test_weights_alone_are_no_model(tmp_path: Path, name: str) -> None:
    """Catches a file of weights parsed as GGUF, with an error about magic numbers."""
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UnknownModelError, match="give its folder"):
        open_source(tmp_path / name)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    """Catches a bare IndexError or an empty model, and a trainer's own pickles taken for weights."""
    torch.save({"step": 1}, tmp_path / "optimizer.pt")
    for load_format in ("auto", "pt"):
        with pytest.raises(TensorSetError, match="holds no weights"):
            open_source(tmp_path, load_format=load_format)
    with pytest.raises(ValueError, match="load_format='bin': use one of auto, pt"):
        open_source(tmp_path, load_format="bin")


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_need_to_be_asked_for(tmp_path: Path, zipped: bool) -> None:
    """Catches a pickle read by default, and weights that differ once it is asked for, in both formats of torch."""
    torch.save({"m": MATRIX}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsafeWeightsError, match=r"\(pytorch_model.bin\), which can be programs; .*load_format='pt'"):
        open_source(tmp_path)
    source = open_source(tmp_path, load_format="pt")
    assert list(source.names()) == ["m"]
    assert (source.shape("m"), source.dtype("m"), source.nbytes("m")) == ((2, 3), "bfloat16", 12)
    assert source.data("m").equal(MATRIX)


class Program:
    """Runs when it is unpickled without care."""

    def __reduce__(self) -> object:
        return os.mkdir, ("was-run",)


def test_a_pickled_program_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches `weights_only=False`: the file makes a folder when it is loaded."""
    monkeypatch.chdir(tmp_path)
    torch.save({"m": MATRIX, "p": Program()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsafeWeightsError, match=r"pytorch_model.bin: .*convert the model to safetensors"):
        open_source(tmp_path, load_format="pt")
    assert not (tmp_path / "was-run").exists()


def test_pickles_that_are_no_tables(tmp_path: Path) -> None:
    """Catches a training checkpoint whose tensors lie deeper, and a file cut short."""
    path = tmp_path / "pytorch_model.bin"
    torch.save({"model": {"m": MATRIX}}, path)
    with pytest.raises(TensorSetError, match="holds a dict, not a table of named tensors"):
        open_source(tmp_path, load_format="pt")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UnsafeWeightsError, match=r"pytorch_model.bin"):
        open_source(tmp_path, load_format="pt")


def test_sharded_pickles_follow_the_same_rules(tmp_path: Path) -> None:
    """E25 for pickles: catches rules that hold for safetensors alone."""
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    torch.save({"a": MATRIX}, tmp_path / names[0])
    torch.save({"b": MATRIX}, tmp_path / names[1])
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    assert set(open_source(tmp_path, load_format="pt").names()) == {"a", "b"}
    torch.save({"a": MATRIX, "b": MATRIX}, tmp_path / names[1])
    with pytest.raises(TensorSetError, match="'a' is in"):
        open_source(tmp_path, load_format="pt")
