"""Running a compiler: in a process group of its own, so that a limit or an interrupt ends it with all its children."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from .errors import BuildTimeout, CompileFailed


@dataclass(frozen=True, slots=True)
class Done:
    """How a process ended: its status (negative for a signal) and what it wrote."""

    status: int
    out: str
    err: str


def spell(command: Sequence[str]) -> str:
    """The command as one would type it."""
    return shlex.join(command)


def programs(command: Sequence[str]) -> tuple[str, ...]:
    """The words of a compiler's command before its first argument: `ccache g++` of `ccache g++ -I /opt/include`."""
    return tuple(takewhile(lambda word: not word.startswith("-"), command))


def run(
    command: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> Done:
    """Run to the end; raises `BuildTimeout` past the limit and `CompileFailed` if it cannot start.

    `env` is added to this process's environment; messages are asked for in English, so that they can be distilled.
    """
    # Without PATH (`env -i`, some service managers) a shell has a default one, and gcc does not find its own parts.
    environment = {"PATH": os.defpath, **os.environ, "LC_ALL": "C", **_scratch(), **(env or {})}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding=sys.getfilesystemencoding(),  # compilers name files, so what they say is read as names are
            errors="surrogateescape",
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise CompileFailed(spell(command), f"{command[0]} does not start: {error}") from error
    try:
        out, err = process.communicate(timeout=timeout_s)
    except BaseException as error:
        _end_group(process)
        if isinstance(error, subprocess.TimeoutExpired):
            text = f"the compiler was still running after {timeout_s:g} s and was ended: {spell(command)}"
            raise BuildTimeout(text) from None
        raise
    return Done(process.returncode, out, err)


def _scratch() -> dict[str, str]:
    """A temporary directory that exists, whatever TMPDIR says: nvcc wants one even to state its folders."""
    try:
        return {"TMPDIR": tempfile.gettempdir()}
    except FileNotFoundError:  # none that can be written
        return {}


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended already
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    process.wait()
