"""Case files: what is written is what was wrong, and it replays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rapid_llm.kernels.registry import dispatcher
from rapid_llm.locate import replay
from rapid_llm.locate.case import write
from rapid_llm.locate.safetensors import BadCaseError, load, save
from tests.locate.test_locate import compare


@pytest.fixture
def case(tiny_path: Path, plugin: None, tmp_path: Path) -> Path:
    found = compare(tiny_path, "native", "native linear=acme")
    path = tmp_path / "case.safetensors"
    write(path, found.exhibits[0], device=found.devices[1], origin={"model": "tiny"})
    return path


def test_a_case_replays_wrong_until_the_row_is_right(case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a case that lost a stride, a scalar or the weight, and one that compares with what it recorded."""
    wrong = replay(case)
    assert (wrong.row, wrong.ok) == ("acme/linear", False)
    assert wrong.place.endswith("down")
    assert wrong.check.ratio == pytest.approx(wrong.recorded)
    monkeypatch.setitem(dispatcher._targets, "acme/linear", dispatcher.load_target("native/linear"))
    right = replay(case)
    assert right.ok
    assert right.recorded == wrong.recorded


def test_a_case_is_a_safetensors_file(case: Path) -> None:
    """Catches: a header that other readers of the format refuse."""
    reader = pytest.importorskip("safetensors")
    with reader.safe_open(str(case), "pt") as file:
        assert set(file.keys()) >= {"input", "weight"}
        document = json.loads(file.metadata()["rapid_llm"])
        assert document["origin"] == {"model": "tiny"}
        assert file.get_tensor("weight").dtype == torch.uint8


def test_tensors_survive_a_file(tmp_path: Path) -> None:
    """Catches: a dtype written under another's name, NaN and empty tensors lost."""
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
    tensors = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    tensors |= {"empty": torch.empty(0, 4), "nan": torch.tensor([float("nan"), -0.0])}
    save(tmp_path / "x", tensors, {"a": [1, None]})
    got, document = load(tmp_path / "x")
    assert document == {"a": [1, None]}
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(torch.nan_to_num(got[name], 7), torch.nan_to_num(tensor, 7))


@pytest.mark.parametrize("damage", ["empty", "text", "short"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    """Catches: a traceback, or garbage that is replayed."""
    path = tmp_path / "bad.safetensors"
    save(path, {"x": torch.ones(100)}, {})
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"hello, this is text\n", "short": whole[:-8]}[damage])
    with pytest.raises(BadCaseError, match=r"bad\.safetensors"):
        replay(path)


@pytest.mark.parametrize(("field", "value", "error"), [("format", 99, "format 99"), ("row", "acme/gone", "acme/gone")])
def test_a_case_that_cannot_run_says_why(case: Path, field: str, value: Any, error: str) -> None:
    """Catches: a replay of another version's case, or of a row that is not there, that passes."""
    tensors, document = load(case)
    save(case, tensors, {**document, field: value})
    with pytest.raises((BadCaseError, RuntimeError), match=error):
        replay(case)
