"""`rapid-llm serve`: what it refuses before it loads anything, how it ends, what it needs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rapid_llm.cli import serve as command
from tests.cli.support import call, environment

from .conftest import mock_llm
from .live import Live, until


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake must be found before a model is loaded."""

    def load(*_: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(command, "make_llm", load)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--port", "70000"], "--port 70000 is no port; use 0 to 65535"),
        (["--max-concurrent-requests", "0"], "--max-concurrent-requests 0: use an integer of 1 or more"),
        (["--max-body-bytes", "5"], "--max-body-bytes 5: use an integer of 1024 or more"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout -1.0: use a number of seconds above 0"),
        (["--stall-timeout", "nan"], "--stall-timeout nan: use a number"),
        (["--tool-format", "smoke"], "--tool-format 'smoke' is not known; use one of hermes, llama3, mistral"),
        (["--log-level", "loud"], "--log-level 'loud' is not known; use one of debug"),
        (["--api-key", ""], "a key needs at least one character"),
        (["--api-key", "two words"], "without spaces"),
        (["--api-key", "@/nowhere/key"], "--api-key @/nowhere/key"),
        (["--served-model-name", ""], "--served-model-name is empty"),
        (["--nonsense"], "--nonsense"),
        (["--max-running", "many"], "'--max-running'"),
    ],
)
def test_a_bad_option_is_named(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a value that is found out after minutes of loading, or never; an error that does not say what to do."""
    done = call("serve", *args, capsys=capsys)
    assert done.status == 2
    assert says in done.err.replace("\n", " "), done.err


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a model loaded for a server that cannot listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = call("serve", "--port", port, capsys=capsys)
    assert done.status == 1
    assert f"--port {port}: Address already in use" in done.err


def test_without_the_extra_it_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a traceback in place of the command that installs what is missing."""
    for name in [name for name in sys.modules if name.startswith("rapid_llm.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = call("serve", capsys=capsys)
    assert done.status == 1
    assert "the server needs the package uvicorn, which is not installed: pip install 'rapid-llm[serve]'" in done.err


def test_the_library_needs_no_web_framework() -> None:
    """Catches: `import rapid_llm` that only works with the extra."""
    code = (
        "import sys, rapid_llm; rapid_llm.SamplingParams; import rapid_llm.cli.app; "
        "print(*{'fastapi', 'starlette', 'uvicorn', 'prometheus_client', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a status other than 0, a stream that a signal cuts, handlers that stay, a key that is not asked for."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread alone")
    llm = mock_llm()
    monkeypatch.setattr(command, "make_llm", lambda *_: llm)
    monkeypatch.setattr("rapid_llm.engine.stats.measured_bandwidth", lambda _: (1e9, "given"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "key").write_text("secret\n")
    client = Live.__new__(Live)
    client.port = port
    found: list[Any] = []

    def use() -> None:
        try:
            until(lambda: _listens(port))
            found.append(client.get("/v1/models")[0])
            found.append(client.get("/v1/models", Authorization="Bearer secret")[1]["data"][0]["id"])
            connection = client.connect()
            body = json.dumps({"prompt": "hi", "max_tokens": 200, "ignore_eos": True, "stream": True})
            connection.request("POST", "/v1/completions", body, {"Authorization": "Bearer secret"})
            answer = connection.getresponse()
            answer.readline()
        finally:
            os.kill(os.getpid(), number)
        found.append(answer.read().decode())

    before = signal.getsignal(number)
    thread = threading.Thread(target=use)
    thread.start()
    key = f"@{tmp_path / 'key'}"
    done = call("serve", "--port", str(port), "--api-key", key, "--served-model-name", "me", capsys=capsys)
    thread.join(20)
    assert done.status == 0, done.err
    assert found[:2] == [401, "me"]
    assert found[2].endswith("data: [DONE]\n\n")
    assert found[2].count('"text":') >= 190
    assert f"me: http://127.0.0.1:{port}" in done.err
    assert signal.getsignal(number) == before


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
