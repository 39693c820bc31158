"""`rapid-llm serve`: a model over HTTP until a signal ends it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .generate import make_llm
from .support import BAD, USAGE, fail, usage

if TYPE_CHECKING:
    from rapid_llm.engine.llm import LLM
    from rapid_llm.server.service import ServerOptions

INSTALL: Final = "pip install 'rapid-llm[serve]'"
INSTALL_REPLICAS: Final = "pip install 'rapid-llm[serve,replicas]'"
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOCAL: Final = ("127.0.0.1", "localhost", "::1")


def run(
    *,
    model: str | None,
    shape: str | None = None,
    names: Sequence[str] | None,
    host: str,
    port: int,
    engine: Mapping[str, Any],
    server: Mapping[str, Any],
    log_level: str,
    replicas: int | None = None,
) -> None:
    """Check everything that can be checked, take the port, load the model, serve. Nothing is loaded for a mistake."""
    if log_level not in LOG_LEVELS:
        fail(f"--log-level {log_level!r} is not known; use one of {', '.join(LOG_LEVELS)}", USAGE)
    if not 0 <= port <= 65535:
        fail(f"--port {port} is no port; use 0 to 65535", USAGE)
    if replicas is not None and replicas < 1:
        fail(f"--replicas {replicas}: use 1 or more", USAGE)
    if replicas is not None and port == 0:
        fail("--port 0 takes any free port, which --replicas cannot; name one", USAGE)
    try:
        from rapid_llm.server.run import Server, bind
        from rapid_llm.server.service import ServerOptions
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "rapid_llm":
            raise
        fail(f"the server needs the package {error.name}, which is not installed: {INSTALL}", BAD)
    from rapid_llm.models.hub import DEFAULT_MODEL

    given = {name: value for name, value in server.items() if value is not None}
    given["api_keys"] = tuple(_key(value) for value in given.get("api_keys", ()))
    with usage():
        options = ServerOptions(**given)
    if shape is not None and model is not None:
        fail("give one of --shape and --model", USAGE)
    shown = list(names or [shape or model or DEFAULT_MODEL])
    if not all(shown):
        fail("--served-model-name is empty; give at least one character", USAGE)
    try:
        socket = bind(host, port)
    except OSError as error:
        fail(f"cannot listen on --host {host} --port {port}: {error.strerror or error}; use another one", BAD)
    if replicas is not None:
        socket.close()  # it is free; Ray Serve takes it
        _run_replicas(replicas, model, shape, shown, host, port, engine, options)
        return
    with socket:
        logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
        llm = make_llm(model, engine) if shape is None else _random(shape, engine)
        _prepare(llm)
        serving = Server(llm, shown, options, read_bandwidth=_bandwidth(llm), log_level=log_level)
        address = f"[{host}]" if ":" in host else host
        print(f"{shown[0]}: http://{address}:{socket.getsockname()[1]} (Ctrl-C ends)", file=sys.stderr, flush=True)
        if host not in LOCAL and not options.api_keys:
            print(f"Whoever reaches {host} can use this server: --api-key would ask for a key", file=sys.stderr)
        serving.run(sockets=[socket])


def _run_replicas(
    count: int,
    model: str | None,
    shape: str | None,
    names: Sequence[str],
    host: str,
    port: int,
    engine: Mapping[str, Any],
    options: ServerOptions,
) -> None:
    from rapid_llm.engine.options import EngineOptions

    given = {name: value for name, value in engine.items() if value is not None}
    with usage():
        EngineOptions(**given)
    try:
        from rapid_llm.server.replica import ReplicaSpec
        from rapid_llm.server.replicas import run as serve_replicas
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "rapid_llm":
            raise
        fail(f"--replicas needs the package {error.name}, which is not installed: {INSTALL_REPLICAS}", BAD)

    def ready() -> None:
        print(f"{names[0]}: {count} replicas at http://{host}:{port} (Ctrl-C ends)", file=sys.stderr, flush=True)

    spec = ReplicaSpec(model, shape, given, tuple(names), options)
    serve_replicas(spec, count, host=host, port=port, ready=ready)


def _random(shape: str, engine: Mapping[str, Any]) -> LLM:
    """An engine that says noise, as fast as the model of that shape would speak."""
    from rapid_llm.models.shapes import shape_config

    shape_config(shape)  # before torch is imported, which takes a second
    from rapid_llm.engine.random_llm import random_llm

    with usage():
        return random_llm(shape, **{name: value for name, value in engine.items() if value is not None})


def _prepare(llm: LLM) -> None:
    """Build what would else be built while the first requests wait."""
    report = llm.prepare()
    if not report.ok:
        print(f"Not everything could be prepared, and slower rows may run:\n{report}", file=sys.stderr)


def _bandwidth(llm: LLM) -> tuple[float, str]:
    """What the memory can give, measured while nothing else runs here."""
    from rapid_llm.engine.stats import measured_bandwidth

    return measured_bandwidth(llm.device)


def _key(value: str) -> str:
    """A key, or what is in the file that `@FILE` names, so that it need not stand on the command line."""
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--api-key {value}: {error}", USAGE)
