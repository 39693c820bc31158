"""A Python for tests that start it as a process: what runs in it finds torch imported, which would take seconds.

`executable()` takes the place of `sys.executable`. Behind it one process a test session, the template, has imported
torch, some tools and nothing of this package; each start is a fork of it with the arguments, the environment, the
folder and the standard streams of a process of its own, and ends like one. So no module, record, signal handler or
thread of a test is found there. What differs from a real start: those packages are there before the code begins, the
hash seed is the template's, and options of the interpreter and variables that it reads at its start have no effect.
Tests of those, of what an import brings, and of sessions and groups of processes take `sys.executable`.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


@functools.cache
def executable() -> str:
    """The path of a program that runs Python's `-c CODE`, `-m MODULE` or FILE with arguments."""
    if not hasattr(socket, "send_fds") or not hasattr(os, "fork"):
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    door = folder / "door"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(door))
        listener.listen(64)
        # `-P` and `-E` leave what every process has, whatever its folder and environment.
        code = "import json, sys; print(json.dumps(sys.path))"
        paths = subprocess.run([sys.executable, "-EPc", code], capture_output=True, text=True, check=True).stdout
        program = folder / "python"
        program.write_text(f"#!{sys.executable} -IS\n{(HERE / 'relay.py').read_text()}")
        program.chmod(0o755)
        command = [sys.executable, str(HERE / "template.py"), str(listener.fileno()), str(program), paths]
        # It ends when its standard input does; a terminal's Ctrl-C is for those who have a handler for it.
        template = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    atexit.register(_end, template)
    return str(program)


def _end(template: subprocess.Popen[bytes]) -> None:
    assert template.stdin is not None
    template.stdin.close()
    template.wait(30)
