"""What the text of a configuration means."""

from __future__ import annotations

from pathlib import Path

import pytest

from rapid_llm.kernels.registry.errors import UnknownRowError
from rapid_llm.locate import Configuration
from rapid_llm.locate.configuration import build
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.gguf import GGUFFile


def test_items() -> None:
    """Catches: an item that is read as another, or dropped."""
    got = Configuration.parse("native, linear=cpp attention_decode=native dtype=bf16,device=cpu dequantised")
    assert got.rows == ((None, "native"), ("linear", "cpp"), ("attention.decode", "native"))
    assert (got.dtype, got.device, got.dequantised, got.reference) == ("bf16", "cpu", True, False)
    assert Configuration.parse("").text == "default"
    assert Configuration.parse("hf").reference


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("nativ", "no backend and no row"),
        ("linear=", "has no value"),
        ("sample=native", "never calls sample"),
        ("hf dtype=bf16", "takes nothing else"),
    ],
)
def test_what_is_not_understood_is_an_error(text: str, error: str) -> None:
    """Catches: an item that is accepted and does nothing."""
    with pytest.raises(ValueError, match=error):
        Configuration.parse(text)


def test_an_unknown_row_comes_with_the_nearest() -> None:
    with pytest.raises(UnknownRowError, match="did you mean"):
        Configuration.parse("linear=nativ")


def build_side(path: Path, text: str) -> dict[tuple[str, str], set[str]]:
    """(bucket, op) -> rows."""
    file = GGUFFile(path)
    side = build(file, ModelConfig.from_gguf(file), Configuration.parse(text))
    found: dict[tuple[str, str], set[str]] = {}
    for where, op, handle in side.decoder.bindings():
        found.setdefault((where, op), set()).add(handle.spec.name)
    return found


def test_a_row_is_forced_where_it_can_run(tiny_path: Path) -> None:
    """Catches: a forced row that takes the whole model down because it cannot run every call."""
    rows = build_side(tiny_path, "native linear=native/linear.q4_1 rmsnorm=native")
    assert {name for (_, op), names in rows.items() if op == "linear" for name in names} == {"native/linear.q4_1"}


def test_a_row_that_fits_nothing_is_an_error(tiny_path: Path) -> None:
    """Catches: a comparison that quietly runs without the row that was asked for."""
    with pytest.raises(ValueError, match=r"cpp/linear\.fp16 runs no call"):
        build_side(tiny_path, "linear=cpp/linear.fp16")
