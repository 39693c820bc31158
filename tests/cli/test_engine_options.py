"""Options of `generate` and `chat` that say how the engine runs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from .support import FakeLLM, call


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]])
def test_options_of_the_engine_are_handed_on(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an option of the engine that is accepted and does nothing, or is set without being given."""
    made: list[dict[str, Any]] = []

    def make(model: str | None, options: dict[str, Any]) -> FakeLLM:
        made.append(options)
        return FakeLLM(["x"])

    for module in ("generate", "chat"):
        monkeypatch.setattr(f"rapid_llm.cli.{module}.make_llm", make)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    args = ["--deterministic", "--no-prefix-caching", "--speculate", "3", "--kv-cache-dtype", "fp8"]
    args += ["--tensor-parallel", "3"]
    assert call(*command, *args, capsys=capsys).status == 0
    (options,) = made
    rest = {name: value for name, value in options.items() if name not in ("dtype", "device") and value is not None}
    speculative = {"method": "ngram", "num_tokens": 3}
    assert rest == {
        "deterministic": True,
        "enable_prefix_caching": False,
        "speculative": speculative,
        "load_format": "auto",
        "kv_cache_dtype": "fp8",
        "tensor_parallel": 3,
    }


def test_a_bad_number_of_guesses_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a value that is found only once the model is loaded."""
    done = call("generate", "hi", "--speculate", "99", capsys=capsys)
    assert done.status == 2
    assert "num_tokens=99: use an integer from 1 to 32" in done.err


def test_ranks_that_do_not_divide_the_model_are_a_usage_error(
    model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SmolLM2 has 9 query and 3 key/value heads. Catches: a head cut in two, and an error that names no option."""
    args = ["--model", str(model_path), "--device", "cpu", "--tensor-parallel", "2"]
    done = call("generate", "hi", *args, capsys=capsys)
    assert done.status == 2
    assert "--tensor-parallel 2: the 9 query heads and 3 key/value heads" in done.err
    assert "1, 3 work" in done.err
