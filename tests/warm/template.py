"""The process that the others are forked from. template.py LISTENER PROGRAM PATHS"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import multiprocessing.process
import multiprocessing.spawn  # keeps this Python for its children: they inherit more than a relay passes on
import os
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import types
from pathlib import Path
from typing import Any

IMPORTED = ("torch", "pytest", "typer", "pydantic", "rich.console")
"""What is slow to import, and imported by most processes of the tests; no package that tests hide."""


def serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns in forks alone: what one is to do, and its streams. The template ends with its standard input."""
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _attend(connection)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _attend(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork once more, for the process itself; tell the relay its id and its end, and end it if the relay goes."""
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    if not size:
        os._exit(0)
    request = json.loads(connection.makefile("rb").read(int.from_bytes(size, "big")))
    child = os.fork()
    if child == 0:
        connection.close()
        return request, streams
    for stream in streams:
        os.close(stream)
    connection.sendall(b"%d\n" % child)

    def watch() -> None:
        with contextlib.suppress(OSError):  # both have ended
            if not connection.recv(1):
                os.kill(child, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):  # the relay was killed
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def become(request: dict[str, Any], streams: list[int], paths: list[str]) -> None:
    """Take on the streams, the environment and the folder that were sent."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        mine = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else mine)
    for number in (0, 1, 2):
        os.close(number)
    for number, stream in zip(request["streams"], streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.umask(request["umask"])
    os.chdir(request["folder"])
    multiprocessing.process.ORIGINAL_DIR = request["folder"]
    os.environ.clear()
    os.environ.update(dict(request["env"]))
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    _open_streams(request["streams"])
    _, first = _kind_and_folder(request["args"])
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *paths]
    sys.path_importer_cache.clear()
    if threads := os.environ.get("OMP_NUM_THREADS"):  # read when torch was imported
        sys.modules["torch"].set_num_threads(int(threads))


def _kind_and_folder(args: list[str]) -> tuple[str, str]:
    """`-c`, `-m` or a file, and the folder that comes first on the import path."""
    if args[0] == "-c":
        return "-c", ""
    if args[0] == "-m":
        return "-m", os.getcwd()
    return "file", str(Path(args[0]).resolve().parent)


def run(args: list[str]) -> None:
    """What Python would run as `__main__`, for good."""
    kind, _ = _kind_and_folder(args)
    sys.argv = args if kind == "file" else [kind, *args[2:]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        runpy._run_module_as_main(args[1])  # type: ignore[attr-defined]
    elif kind == "-c":
        exec(compile(args[1], "<string>", "exec"), main.__dict__)
    else:
        main.__file__ = str(Path(args[0]).absolute())
        exec(compile(Path(args[0]).read_bytes(), args[0], "exec"), main.__dict__)


def leave(error: BaseException | None) -> None:
    """End as Python does, but for the modules, whose clearing would take longer than most tests."""
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int) and sys.stderr is not None:
            print(error.code, file=sys.stderr)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError as failure:
            status = 120
            if stream is sys.stdout and sys.stderr is not None:
                print(f"Exception ignored in: {stream!r}\n{type(failure).__name__}: {failure}", file=sys.stderr)
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _open_streams(numbers: list[int]) -> None:
    """As Python opens its own: whole lines where a terminal is, blocks elsewhere, errors by lines; None for none."""
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    eager = bool(os.environ.get("PYTHONUNBUFFERED"))
    for name in ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__"):
        setattr(sys, name, None)
    if 0 in numbers:
        raw = io.FileIO(0, "r", closefd=False)
        raw.name = "<stdin>"  # type: ignore[misc]
        sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(raw), encoding, errors)  # type: ignore[misc]
        sys.stdin.mode = "r"  # type: ignore[misc]
    for number, name in ((1, "stdout"), (2, "stderr")):
        if number not in numbers:
            continue
        raw = io.FileIO(number, "w", closefd=False)
        raw.name = f"<{name}>"  # type: ignore[misc]
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding,
            errors=errors if number == 1 else "backslashreplace",
            line_buffering=not eager and (number == 2 or raw.isatty()),
            write_through=eager,
        )
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    program, paths = sys.argv[2], json.loads(sys.argv[3])
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.executable = program
    gc.freeze()
    request, streams = serve(listener)
    become(request, streams, paths)
    try:
        run(request["args"])
    except BaseException as error:
        leave(error)
    leave(None)


main()
