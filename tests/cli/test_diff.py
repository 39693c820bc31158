"""`rapid-llm diff`: what it prints and writes, and how it ends."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from rapid_llm.cli.diff import _where
from tests.locate import planted

from .support import call

SHORT = ("--threads", "1", "--prompt", "hi hi 12 " * 8, "--prompt", "x 12")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(planted.model(tmp_path_factory.mktemp("diff") / "tiny.gguf"))


def test_a_guilty_row_ends_with_one_and_a_case_that_replays(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a report that does not name the row, a case that is not where it says, exit status 0 for a fault."""
    case = str(tmp_path / "case.safetensors")
    (tmp_path / "acme").mkdir()
    with planted.installed(tmp_path / "acme"):
        args = ("diff", *SHORT, "--model", model, "--b", "linear=acme/linear", "--case", case)
        found = call(*args, capsys=capsys)
        assert found.status == 1
        assert "GUILTY acme/linear (linear, side b) in layers 0-1: " in found.out
        assert "swapped into a alone, acme/linear brings the difference about" in found.out
        assert f"--replay {case}" in found.out
        data = json.loads(call(*args, "--json", capsys=capsys).out)
        assert data["ok"] is False
        assert data["guilty"][0]["row"] == "acme/linear"
        assert data["runs"] <= data["limit"]
        assert data["case"] == case
        again = call("diff", "--replay", case, capsys=capsys)
        assert (again.status, "out of its bound" in again.out) == (1, True)
        assert json.loads(call("diff", "--replay", case, "--json", capsys=capsys).out)["ok"] is False
    gone = call("diff", "--replay", case, capsys=capsys)
    assert gone.status == 2
    assert "acme/linear" in gone.err


def test_agreement_ends_with_zero_and_writes_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a case file without a fault; a table or a picture that is missing."""
    monkeypatch.chdir(tmp_path)
    found = call("diff", "--threads", "1", "--model", model, "--prompt", "hi hi 12", capsys=capsys)
    assert found.status == 0
    assert "every row is within its bound" in found.out
    assert "error by layer" in found.out
    assert "model runs for" in found.out
    assert "never called, so nothing is known of" in found.out, "the prompts are too short for some rows"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("args", [("--a", "nativ"), ("--b", "linear=nativ"), ("--b", "hf"), ("--prompt", "")])
def test_usage(model: str, args: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a typing error that ends like a finding, or in a traceback."""
    assert call("diff", "--threads", "1", "--model", model, *args, capsys=capsys).status == 2


def test_a_plot_is_a_png_or_says_what_is_missing(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a plot that is accepted and not drawn."""
    path = tmp_path / "layers.png"
    done = call("diff", *SHORT, "--model", model, "--b", "native", "--plot", str(path), capsys=capsys)
    if importlib.util.find_spec("matplotlib") is None:
        assert done.status == 2
        assert "pip install matplotlib" in done.err
    else:
        assert done.status == 0
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("places", "text"),
    [
        (("layer 4",), "layer 4"),
        (("embedding",), "embedding"),
        (("layer 0", "layer 1", "layer 3", "head"), "layers 0-1, 3, head"),
    ],
)
def test_places_are_told_in_few_words(places: tuple[str, ...], text: str) -> None:
    """Catches: thirty layers listed one by one, the head counted as a layer."""
    assert _where(places) == text
