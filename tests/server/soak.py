"""`python -m tests.server.soak SECONDS CLIENTS`: a server with the default model, in a process of its own, under load.

Exits with 1 unless every accepted request ended, hostile ones were refused, /health stayed under 100 ms, memory stayed
flat, nothing was left in the engine, the same question had the same answer before and after, and the server ended well.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

from .load import Load, figures

HEALTH_S = 0.1
"""99 of 100 answers of /health must come within this. The clients share the machine, which may hold one up."""

SHARE = 0.5
"""By this share of the load, caches have filled and memory must not grow any more."""

# oneDNN and torch's use of it each keep up to 1024 kernels, one for each number of tokens and shape that they met:
# hundreds of MB, which take far longer than a soak to fill and would hide a leak. The server is told to keep fewer.
GROWTH = 48 << 20
"""Bytes that the server may still grow by then: 48 MiB."""


def main(seconds: float, clients: int) -> None:
    """Raises, or exits with a text, where something is wrong."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = f"{sys.executable} -m rapid_llm.cli serve --port {port} --log-level error".split()
    command += ["--max-model-len", "2048", "--kv-cache-tokens", "4096"]
    kernels = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}
    server = subprocess.Popen(command, env={**os.environ, **kernels})
    try:
        _wait(server, port)
        before = _answer(port)
        load, sizes, health = Load(port, longest=24), list[int](), list[tuple[int, float]]()
        stop = multiprocessing.Event()
        watches = [threading.Thread(target=_weigh, args=(server.pid, sizes, stop))]
        watches.append(threading.Thread(target=_ask_after_health, args=(port, health, stop)))
        for watch in watches:
            watch.start()
        try:
            load.run(clients, seconds)
        finally:
            stop.set()
            for watch in watches:
                watch.join()
        _settle(port)
        same = _answer(port) == before
        server.send_signal(signal.SIGTERM)
        status = server.wait(60)
    finally:
        server.kill()
        server.wait()
    _judge(load, sizes, health, same, status)


def _judge(load: Load, sizes: list[int], health: list[tuple[int, float]], same: bool, status: int) -> None:
    print(", ".join(f"{count} {name}" for name, count in load.counts.most_common()))
    times = sorted(seconds for _, seconds in health)
    middle, late, worst = (1e3 * t for t in (statistics.median(times), times[int(len(times) * 0.99)], times[-1]))
    print(f"/health {len(times)} times: median {middle:.1f}, 99 % {late:.1f}, worst {worst:.1f} ms")
    early, last = max(sizes[: int(len(sizes) * SHARE) + 1]), statistics.median(sizes[-5:])
    print(f"resident memory {early / 2**20:.0f} MiB at most in the first half, {last / 2**20:.0f} MiB at the end")
    curve = sizes[:: max(1, len(sizes) // 20)]
    print("MiB over time:", *(size >> 20 for size in curve))
    faults = []
    if late > 1e3 * HEALTH_S:
        faults.append(f"/health took {late:.0f} ms")
    if (sick := sum(status != 200 for status, _ in health)) > 0:
        faults.append(f"/health did not say 200 {sick} times")
    if last > early + GROWTH:
        faults.append("memory grew")
    if not same:
        faults.append("the same question has another answer after the load")
    if status != 0:
        faults.append(f"the server ended with {status}")
    if faults:
        sys.exit("; ".join(faults))
    print("every accepted request ended, nothing was left behind")


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(600):
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode} before it served")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    sys.exit("the server did not begin to serve within two minutes")


def _answer(port: int) -> str:
    body = json.dumps({"prompt": "Once upon a time", "temperature": 0, "max_tokens": 16}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def _weigh(pid: int, sizes: list[int], stop: Event) -> None:
    """Resident bytes of a process, once a second."""
    page = os.sysconf("SC_PAGE_SIZE")
    while not stop.wait(1.0):
        sizes.append(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page)


def _ask_after_health(port: int, found: list[tuple[int, float]], stop: Event) -> None:
    """Ten times a second, each time by a connection of its own, from a process that nothing else holds up."""
    mine, theirs = multiprocessing.Pipe(duplex=False)
    prober = multiprocessing.Process(target=_probe, args=(port, theirs, stop), daemon=True)
    prober.start()
    found += mine.recv()
    prober.join()


def _probe(port: int, results: Connection, stop: Event) -> None:
    found = []
    while not stop.wait(0.1):
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/health")
        status = connection.getresponse().status
        found.append((status, time.monotonic() - began))
        connection.close()
    results.send(found)


def _settle(port: int) -> None:
    """Until nothing is left in the engine; exits where something stays."""
    names = ("requests_running", "requests_waiting", "answers_open", "kv_cache_usage_ratio")
    left: dict[str, float] = {}
    for _ in range(300):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            found = figures(answer.read().decode())
        left = {name: found[f"rapid_llm_{name}"] for name in names}
        if not any(left.values()):
            return
        time.sleep(0.1)
    sys.exit(f"left in the engine: {left}")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
