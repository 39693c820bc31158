"""`generate` and `chat`: what is asked of the engine, what is printed, and how they end."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rapid_llm.engine.outputs import TextDelta
from tests import warm

from .support import ROOT, call, environment, rapid_llm, type_lines


def test_generate_streams(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches text that is printed twice or changed, and an ending without a newline (or with two)."""
    fake(["Par", "is", ".", ""], ["done\n"])
    assert call("generate", "hi", capsys=capsys).out == "Paris.\n"
    assert call("generate", "hi", capsys=capsys).out == "done\n"


def test_generate_hands_on_every_option(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an option that is accepted and does nothing."""
    llm = fake(["x"])
    args = ["--max-tokens", "7", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--min-p", "0.1"]
    args += ["--seed", "4", "--stop", "a", "--stop", "b", "--ignore-eos", "--model", "m", "--dtype", "fp32"]
    args += ["--device", "cpu", "--threads", "2", "--max-model-len", "99"]
    args += ["--quantization", "int8", "--load-format", "pt"]
    assert call("generate", "hi", *args, capsys=capsys).status == 0
    (params,) = llm.params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (7, 0.5, 3, 0.9, 0.1)
    assert (params.seed, params.stop, params.ignore_eos) == (4, ("a", "b"), True)
    sizes = {"dtype": "fp32", "device": "cpu", "threads": 2, "max_model_len": 99}
    assert llm.made == [("m", {**sizes, "quantization": "int8", "load_format": "pt"})]
    assert llm.asked == ["hi"]


def test_generate_as_chat(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    llm = fake(["x"], ["y"])
    assert call("generate", "--chat", "hi", capsys=capsys).out == "x\n"
    call("generate", "--chat", "hi", "--json", capsys=capsys)
    assert llm.asked == [[{"role": "user", "content": "hi"}]] * 2


def test_generate_json(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches anything but one JSON document on standard output."""
    fake(["Par", "is"])
    data = json.loads(call("generate", "hi", "--json", capsys=capsys).out)
    assert data["prompt_token_ids"] == [5, 6]
    assert data["outputs"][0]["text"] == "Paris"
    assert data["outputs"][0]["finish_reason"] == "stop"
    assert data["metrics"]["time_to_first_token"] == 0.5
    assert data["metrics"]["tokens_per_second"] > 0


def test_generate_reads_standard_input(
    fake: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = fake(["x"])
    type_lines(monkeypatch, "one", "two")
    call("generate", "-", capsys=capsys)
    assert llm.asked == ["one\ntwo\n"]


@pytest.mark.parametrize(
    ("args", "stdin", "says"),
    [
        (["generate", ""], b"", "the prompt is empty"),
        (["generate", "-"], b"", "the prompt is empty"),
        (["generate", "-"], b"caf\xe9", "standard input is not utf-8"),
        (["generate", "caf\udce9"], b"", "the prompt holds a lone surrogate U+DCE9"),
        (["generate", "x", "--temperature", "-1"], b"", "--temperature -1.0 is not accepted; use a finite number"),
        (["generate", "x", "--temperature", "nan"], b"", "--temperature nan"),
        (["generate", "x", "--max-tokens", "0"], b"", "--max-tokens 0"),
        (["generate", "x", "--stop", ""], b"", "--stop [''] is not accepted"),
        (["generate", "x", "--dtype", "int3"], b"", "--dtype 'int3' is not known"),
        (["generate", "x", "--threads", "0"], b"", "--threads 0"),
        (["generate", "x", "--model", "nosuch"], b"", "neither a file, a folder nor a known name"),
        (["chat", "--top-p", "2"], b"", "--top-p 2.0"),
    ],
)
def test_wrong_values_are_status_2(
    args: list[str], stdin: bytes, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a value that is passed over, a traceback, and a model loaded before the mistake is found."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", "/dev/null/none")  # so that loading would fail with another status
    type_lines(monkeypatch, stdin)
    result = call(*args, capsys=capsys)
    assert (result.status, result.out) == (2, "")
    assert says in result.err


def test_a_prompt_that_cannot_be_served_is_status_2(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake(ValueError("prompt has 9000 tokens"), ValueError("prompt has 9000 tokens"))
    for more in ([], ["--json"]):
        result = call("generate", "x", *more, capsys=capsys)
        assert (result.status, result.out, result.err) == (2, "", "Error: prompt has 9000 tokens\n")


def test_a_fault_of_the_program_keeps_its_traceback(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a handler so wide that real faults look like user errors."""
    fake([ValueError("inside a step")])
    with pytest.raises(ValueError, match="inside a step"):
        call("generate", "x", capsys=capsys)


def test_an_answer_that_failed_is_status_1(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """E58: catches a model whose numbers broke, taken for one that had nothing to say."""
    broken = TextDelta("", finish_reason="error", stop_reason="the logits hold NaN")
    fake(["one", broken], [])
    result = call("generate", "x", capsys=capsys)
    assert (result.status, result.out, result.err) == (1, "one\n", "Error: the logits hold NaN\n")


def test_interrupt_ends_quietly(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback after Ctrl-C, text that is lost, and a request left in the engine."""
    llm = fake(["one ", KeyboardInterrupt()])
    result = call("generate", "x", capsys=capsys)
    assert (result.status, result.out) == (130, "one ")
    assert "Traceback" not in result.err
    assert llm.closed == 1


def test_chat_keeps_the_conversation(
    fake: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a forgotten turn, a lost system message, and empty lines that are sent."""
    llm = fake(["Hel", "lo."], ["Salut."])
    type_lines(monkeypatch, "Hi", "", "   ", "In French?")
    result = call("chat", "--system", "Be brief.", capsys=capsys)
    assert (result.status, result.out) == (0, "Hello.\nSalut.\n")
    assert llm.asked[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "In French?"},
    ]


def test_chat_commands(fake: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a command that reaches the model, and a typo of one that does."""
    llm = fake(["a"], ["b"], ["c"], ["never"])
    type_lines(monkeypatch, "one", "/clear", "two", "/system New.", "/claer", "/help", "//exit", "/exit", "three")
    result = call("chat", "--system", "Old.", capsys=capsys)
    assert (result.status, result.out) == (0, "a\nb\nc\n")
    assert [[m["content"] for m in asked] for asked in llm.asked] == [
        ["Old.", "one"],
        ["Old.", "two"],
        ["New.", "/exit"],
    ]
    assert "/claer is no command" in result.err
    assert "/system TEXT" in result.err


def test_chat_goes_on_after_a_message_it_cannot_serve(
    fake: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """E39: catches a conversation that dies, or keeps the message that does not fit."""
    llm = fake(["a"], ValueError("prompt has 9000 tokens"), ["c"])
    type_lines(monkeypatch, "one", "two", "three")
    result = call("chat", capsys=capsys)
    assert (result.status, result.out) == (0, "a\nc\n")
    assert "9000 tokens" in result.err
    assert [m["content"] for m in llm.asked[2]] == ["one", "a", "three"]


def test_chat_input_that_is_not_text(
    fake: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(["a"])
    type_lines(monkeypatch, b"caf\xe9\n")
    result = call("chat", capsys=capsys)
    assert result.status == 2
    assert "standard input is not utf-8" in result.err


TERMINAL = """
import time
from tests.cli.support import FakeLLM
from rapid_llm.cli import chat, main

class Slow(FakeLLM):
    def _say(self, words):
        for delta in super()._say(words):
            yield delta
            time.sleep(float(delta == "endless") * 60)

chat.make_llm = lambda model, options: Slow(["endless", "never"], ["sec", "ond"])
main()
"""


def heed_interrupts() -> None:
    """A shell starts background jobs with SIGINT ignored, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_chat_on_a_terminal() -> None:
    """Catches a Ctrl-C that ends more than the answer, a missing prompt, and a traceback after Ctrl-C at the prompt."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", TERMINAL, "chat"]
    env = environment(TERM="dumb")
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True, preexec_fn=heed_interrupts
    ) as process:
        os.close(theirs)
        try:
            seen = read_until(ours, b"> ")
            os.write(ours, b"one\n")
            seen += read_until(ours, b"endless")
            os.kill(process.pid, signal.SIGINT)
            seen += read_until(ours, b"> ")
            os.write(ours, b"two\n")
            seen += read_until(ours, b"> ")
            time.sleep(0.5)  # the prompt is written just before the terminal is read
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(20) == 130, seen
        finally:
            process.kill()
            os.close(ours)
    assert b"[stopped]" in seen
    assert b"second" in seen
    assert b"Traceback" not in seen


def read_until(terminal: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], 20)
        assert ready, f"{wanted!r} never came after {seen!r}"
        seen += os.read(terminal, 4096)
    return seen


@pytest.mark.model
def test_generate_for_real(model_path: Path) -> None:
    """Catches anything between the command line and the model that changes the answer (ids are promised for float32),
    and figures that land in the text or miss their rows."""
    case = json.loads((ROOT / "tests" / "data" / "smollm2_reference.json").read_text())["cases"]["plain"]
    args = ["--model", str(model_path), "--dtype", "float32", "--max-tokens", "10", "--threads", "1", "--stats"]
    done = rapid_llm("generate", case["prompt_text"], *args)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 20
    assert case["greedy_text"].startswith(done.stdout.removesuffix("\n"))
    assert "decode:" in done.stderr
    assert "linear" in done.stderr


@pytest.mark.model
def test_chat_for_real_through_a_pipe(model_path: Path) -> None:
    args = ["--model", str(model_path), "--max-tokens", "4", "--threads", "1"]
    done = rapid_llm("chat", *args, stdin="Hi\n<|im_end|>\n/exit\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 0
    assert "<|im_" not in done.stdout


@pytest.mark.model
def test_a_reader_that_goes_away(model_path: Path) -> None:
    """Catches a traceback, or generation that runs on for nobody."""
    command = [warm.executable(), "-m", "rapid_llm.cli", "generate", "Once upon a time", "--model", str(model_path)]
    command += ["--max-tokens", "4000", "--ignore-eos", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert len(process.stdout.read(10)) == 10
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(60) == 141
    assert errors == ""


@pytest.mark.model
def test_ctrl_c_for_real(model_path: Path) -> None:
    """Catches a traceback or a hang when the interrupt arrives inside a step."""
    command = [warm.executable(), "-m", "rapid_llm.cli", "generate", "Once upon a time", "--model", str(model_path)]
    command += ["--max-tokens", "4000", "--ignore-eos", "--threads", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), preexec_fn=heed_interrupts
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(10)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == b""
