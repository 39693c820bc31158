"""Running the command: as a process, as users do, or in this process with the model replaced."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rapid_llm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, TextDelta
from tests import warm

ROOT = Path(__file__).parents[2]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, without the user's own settings, with the source tree in front."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAPID_LLM_")}
    return {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **changes}


def rapid_llm(
    *args: str, stdin: str | bytes = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`rapid-llm ARGS` in a process of its own."""
    done = subprocess.run(
        [warm.executable(), "-m", "rapid_llm.cli", *args],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        env=environment(**(env or {})),
        timeout=120,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


class FakeLLM:
    """Says given texts, one delta a word; keeps what it was asked. An exception among the words is raised."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.params: list[Any] = []
        self.closed = 0

    def _deltas(self, asked: Any, params: Any) -> Iterator[TextDelta]:
        self.asked.append(asked)
        self.params.append(params)
        words = self.answers.pop(0)
        if isinstance(words, ValueError):
            raise words
        return self._say(words)

    def _say(self, words: list[Any]) -> Iterator[TextDelta]:
        try:
            for i, word in enumerate(words):
                if isinstance(word, BaseException):
                    raise word
                last = i == len(words) - 1
                yield word if isinstance(word, TextDelta) else TextDelta(word, finish_reason="stop" if last else None)
        finally:
            self.closed += 1

    def stream(self, prompt: str, params: Any) -> Iterator[TextDelta]:
        return self._deltas(prompt, params)

    def stream_chat(self, messages: list[dict[str, str]], params: Any) -> Iterator[TextDelta]:
        return self._deltas([dict(m) for m in messages], params)

    def generate(self, prompt: str, params: Any) -> list[RequestOutput]:
        text = "".join(self._deltas(prompt, params))
        metrics = RequestMetrics(1.0, first_token=1.5, finished=2.5, prompt_tokens=2, output_tokens=3)
        return [RequestOutput("0", prompt, [5, 6], [CompletionOutput(0, text, [7], None, "stop", None)], metrics)]

    def chat(self, messages: list[dict[str, str]], params: Any) -> list[RequestOutput]:
        return self.generate(messages, params)  # type: ignore[arg-type]


def call(*args: str, capsys: pytest.CaptureFixture[str]) -> SimpleNamespace:
    """The command in this process: `status`, `out`, `err`."""
    from rapid_llm.cli.app import app

    with pytest.raises(SystemExit) as left:
        app(list(args), prog_name="rapid-llm")
    captured = capsys.readouterr()
    return SimpleNamespace(status=left.value.code or 0, out=captured.out, err=captured.err)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | bytes) -> None:
    """These lines are what standard input holds."""
    data = b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
