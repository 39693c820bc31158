"""How a request is to be sampled, as options of `generate` and `chat`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rapid_llm import SamplingParams
from rapid_llm.engine.params import StructuredOutput

from .support import call, type_lines

EVERYTHING = [
    *("--min-tokens", "2", "--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "-1"),
    *("--logit-bias", "5=-100", "--logit-bias", "7=1.5", "--stop-token-id", "9", "--stop-token-id", "8"),
    *("--n", "3", "--logprobs", "2", "--prompt-logprobs", "0", "--echo"),
]


def test_generate_hands_on_what_shapes_the_answer(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an option of a request that is accepted and does nothing, or arrives under another name."""
    llm = fake(["x"])
    assert call("generate", "hi", *EVERYTHING, "--json", capsys=capsys).status == 0
    given = {f.name: getattr(llm.params[0], f.name) for f in dataclasses.fields(SamplingParams)}
    plain = SamplingParams(max_tokens=256, temperature=0.0)
    changed = {name: value for name, value in given.items() if value != getattr(plain, name)}
    assert changed == {
        "min_tokens": 2,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -1.0,
        "logit_bias": ((5, -100.0), (7, 1.5)),
        "stop_token_ids": (9, 8),
        "n": 3,
        "logprobs": 2,
        "prompt_logprobs": 0,
        "echo": True,
    }


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]])
@pytest.mark.parametrize(
    ("args", "form"),
    [
        (["--json-schema", '{"type": "integer"}'], {"json_schema": {"type": "integer"}}),
        (["--json-schema", "@schema"], {"json_schema": {"type": "integer"}}),
        (["--json-object"], {"json_object": True}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--choice", "yes", "--choice", "no"], {"choices": ["yes", "no"]}),
        (["--grammar", 'start: "a"'], {"grammar": 'start: "a"'}),
        (["--grammar", "@schema"], {"grammar": '{"type": "integer"}'}),
    ],
)
def test_structures_are_handed_on(
    command: list[str],
    args: list[str],
    form: dict[str, Any],
    fake: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Catches a form that is dropped, a file's name that is taken for the text, and a command that lacks the option."""
    (tmp_path / "schema").write_text('{"type": "integer"}')
    monkeypatch.chdir(tmp_path)
    type_lines(monkeypatch, "hi")
    llm = fake(["x"])
    assert call(*command, *args, capsys=capsys).status == 0
    assert llm.params[0].structured == StructuredOutput(**form)


def test_chat_hands_on_penalties(
    fake: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an option of chat that is accepted and does nothing."""
    type_lines(monkeypatch, "hi")
    llm = fake(["x"])
    args = ["--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "-1", "--stop", "a"]
    assert call("chat", *args, "--logit-bias", "5=-100", capsys=capsys).status == 0
    (params,) = llm.params
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, 0.5, -1.0)
    assert (params.stop, params.logit_bias) == (("a",), ((5, -100.0),))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["generate", "x", "--frequency-penalty", "2.5"], "--frequency-penalty 2.5 is not accepted"),
        (["generate", "x", "--logit-bias", "5"], "--logit-bias '5' is not accepted; use ID=BIAS"),
        (["generate", "x", "--logit-bias", "5=1", "--logit-bias", "5=2"], "--logit-bias names token 5 twice"),
        (["generate", "x", "--logit-bias", "5=101"], "--logit-bias {5: 101.0} is not accepted"),
        (["generate", "x", "--stop-token-id", "-1"], "--stop-token-id [-1] is not accepted"),
        (["generate", "x", "--n", "2"], "--n is shown as JSON alone; give --json too"),
        (["generate", "x", "--n", "0"], "--n 0 is not accepted"),
        (["generate", "x", "--logprobs", "1"], "--logprobs is shown as JSON alone"),
        (["generate", "x", "--prompt-logprobs", "1"], "--prompt-logprobs is shown as JSON alone"),
        (["generate", "x", "--json-schema", "@/none"], "--json-schema @/none: "),
        (["generate", "x", "--json-schema", "{"], "--json-schema '{' is not accepted"),
        (["generate", "x", "--choice", ""], "--choice [''] is not accepted"),
        (["generate", "x", "--regex", "a", "--json-object"], "use exactly one of"),
        (["generate", "x", "--regex", "a", "--ignore-eos"], "--ignore-eos True is not accepted"),
    ],
)
def test_wrong_values_are_status_2(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a value that is passed over, a traceback, and a model loaded before the mistake is found."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", "/dev/null/none")  # so that loading would fail with another status
    result = call(*args, capsys=capsys)
    assert (result.status, result.out) == (2, "")
    assert says in result.err
