"""`rapid-llm serve --replicas` on Ray Serve, as a process; needs the extra `replicas`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import call

ROOT = Path(__file__).resolve().parents[2]
READY_S = 240
RAY = importlib.util.find_spec("ray") is not None


class Served:
    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: Any = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def hits(self) -> dict[str, float]:
        """Tokens that were found in each replica's prefix cache."""
        text = self.ask("/metrics")[1]
        found = re.findall(r'^rapid_llm_prefix_cache_hit_tokens_total\{replica="(\d)"\} (\S+)$', text, re.MULTILINE)
        return {replica: float(value) for replica, value in found}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    options = ["--shape", "smollm2-135m", "--device", "cpu", "--dtype", "float32", "--kv-cache-tokens", "1024"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rapid_llm.cli", "serve", "--replicas", "2", "--port", str(port), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "2 replicas at" in line:
            break
    else:
        pytest.fail("".join(lines[-30:]))
    try:
        yield Served(process, port)
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not RAY, reason="needs the extra `replicas`: ray is not installed")
@pytest.mark.timeout(READY_S + 120)
def test_replicas_answer_behind_one_address(served: Served) -> None:
    """Catches: replicas that are started and not asked, prompts computed twice, a server that does not end well."""
    assert json.loads(served.ask("/health")[1])["status"] == "ok"
    body = {"prompt": "the same beginning " * 20, "max_tokens": 3, "temperature": 0}
    texts = [json.loads(served.ask("/v1/completions", body)[1])["choices"][0]["text"] for _ in range(2)]
    assert texts[0] == texts[1]
    other = {**body, "prompt": "another beginning " * 20, "stream": True}
    assert served.ask("/v1/completions", other)[1].rstrip().endswith("data: [DONE]")
    hits = served.hits()
    assert sorted(hits.values())[0] == 0
    assert sorted(hits.values())[1] > 0
    assert served.ask("/v1/completions", {"prompt": 5})[0] == 422
    served.process.send_signal(signal.SIGTERM)
    for _ in range(600):
        if served.process.poll() is not None:
            break
        time.sleep(0.1)
    assert served.process.returncode == 0


@pytest.mark.skipif(RAY, reason="ray is installed")
def test_without_ray_the_way_to_get_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a traceback, and a server of one engine in place of what was asked for."""
    done = call("serve", "--replicas", "2", "--port", str(_free_port()), capsys=capsys)
    assert done.status == 1
    assert "--replicas needs the package ray" in done.err
    assert "rapid-llm[serve,replicas]" in done.err


def test_numbers_that_cannot_be_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: no replicas at all, and a port that nobody can know."""
    assert call("serve", "--replicas", "0", capsys=capsys).status == 2
    done = call("serve", "--replicas", "2", "--port", "0", capsys=capsys)
    assert done.status == 2
    assert "--port 0" in done.err


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
