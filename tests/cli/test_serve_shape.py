"""`rapid-llm serve --shape`, the server itself replaced."""

from __future__ import annotations

from typing import Any

import pytest

from .support import call

pytest.importorskip("fastapi", reason="needs the extra `serve`")


def test_a_shape_is_served_under_its_name_with_the_engine_s_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a model that is loaded in place of the shape, options that do not reach its engine, another name."""
    made: list[Any] = []
    monkeypatch.setattr("rapid_llm.engine.random_llm.random_llm", lambda shape, **given: made.append((shape, given)))
    monkeypatch.setattr("rapid_llm.cli.serve.make_llm", lambda *args: pytest.fail("a model was loaded"))
    monkeypatch.setattr("rapid_llm.cli.serve._prepare", lambda llm: None)
    monkeypatch.setattr("rapid_llm.cli.serve._bandwidth", lambda llm: (1.0, "given"))

    class Server:
        def __init__(self, llm: Any, names: list[str], *args: Any, **given: Any) -> None:
            made.append(names)

        def run(self, sockets: Any) -> None:
            made.append("ran")

    monkeypatch.setattr("rapid_llm.server.run.Server", Server)
    done = call("serve", "--shape", "qwen3-8b", "--port", "0", "--kv-cache-tokens", "64", capsys=capsys)
    assert done.status == 0, done.err
    (shape, given), *rest = made
    assert (shape, given["kv_cache_tokens"]) == ("qwen3-8b", 64)
    assert rest == [["qwen3-8b"], "ran"]


@pytest.mark.parametrize(
    ("args", "says"),
    [(["--shape", "qwen3-9b"], "did you mean 'qwen3-8b'"), (["--shape", "qwen3-8b", "--model", "x"], "one of --shape")],
)
def test_mistakes_are_usage_errors(capsys: pytest.CaptureFixture[str], args: list[str], says: str) -> None:
    """Catches: a shape that is guessed, or one of two that is passed over."""
    done = call("serve", *args, "--port", "0", capsys=capsys)
    assert done.status == 2
    assert says in done.err
